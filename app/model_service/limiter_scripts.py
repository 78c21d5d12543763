"""Defines the limiter's Redis scripts (Redis 6.2 to 7).

Each limit has four keys: members, sum, line, seen. Members of a rate are `HOLDER AMOUNT`, scored with the time of the
call in ms; `sum` is the total of their amounts and changes with them alone. Members of a concurrency are holders,
scored with the end of their lease. The queue `line` has holders by the time of their arrival, `seen` the same holders
by the time at which their place expires.
"""

from __future__ import annotations

_CLOCK = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

_AMOUNT = """
local function amount_of(member) return tonumber(string.match(member, ' (%d+)$')) end
"""

ACQUIRE = (
    _CLOCK
    + _AMOUNT
    + """
local holder, window, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local first, first_ahead, first_due = 0, 0, -1
local refused = {}

local function purge(members, sum, line, seen, what)
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', now)) do
        redis.call('ZREM', line, gone)
        redis.call('ZREM', seen, gone)
    end
    if what == 'concurrency' then
        redis.call('ZREMRANGEBYSCORE', members, '-inf', now)
        return redis.call('ZCARD', members)
    end
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', now - window)) do
        redis.call('ZREM', members, old)
        redis.call('DECRBY', sum, amount_of(old))
    end
    return tonumber(redis.call('GET', sum)) or 0
end

for i = 1, #KEYS / 4 do
    local members, sum, line, seen = KEYS[4*i-3], KEYS[4*i-2], KEYS[4*i-1], KEYS[4*i]
    local what, capacity, amount = ARGV[3*i+1], tonumber(ARGV[3*i+2]), tonumber(ARGV[3*i+3])
    local used = purge(members, sum, line, seen, what)
    local ahead = redis.call('ZRANK', line, holder) or redis.call('ZCARD', line)
    -- Calls ahead want one each, as this one does; of tokens no call may pass those ahead.
    local fits = used + amount * (ahead + 1) <= capacity
    if what == 'tokens' then fits = used + amount <= capacity and ahead == 0 end
    local mine = what == 'concurrency' and holder or holder .. ' ' .. ARGV[3*i+3]
    if redis.call('ZSCORE', members, mine) then fits = true end -- taken already; the answer was lost
    if not fits then
        refused[i] = true
        if first == 0 then
            first, first_ahead = i, ahead
            if what ~= 'concurrency' and ahead == 0 then
                local oldest = redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')
                if oldest[2] then first_due = math.max(0, tonumber(oldest[2]) + window - now + 1) end
            end
        end
    end
end

for i = 1, #KEYS / 4 do
    local members, sum, line, seen = KEYS[4*i-3], KEYS[4*i-2], KEYS[4*i-1], KEYS[4*i]
    local what, amount = ARGV[3*i+1], ARGV[3*i+3]
    if refused[i] then
        redis.call('ZADD', line, 'NX', now, holder)
        redis.call('ZADD', seen, now + 5000, holder)
        redis.call('PEXPIRE', line, 10000)
        redis.call('PEXPIRE', seen, 10000)
    else
        redis.call('ZREM', line, holder)
        redis.call('ZREM', seen, holder)
        if first == 0 then
            if what == 'concurrency' then
                redis.call('ZADD', members, now + lease, holder)
                redis.call('PEXPIRE', members, lease * 2)
            elseif redis.call('ZADD', members, 'NX', now, holder .. ' ' .. amount) == 1 then
                redis.call('INCRBY', sum, amount)
                redis.call('PEXPIRE', members, window * 2)
                redis.call('PEXPIRE', sum, window * 2)
            end
        end
    end
end
return {first == 0 and 1 or 0, first, first_ahead, first_due}
"""
)
"""Acquires all limits or none. ARGV: holder, window in ms, lease in ms, then what, capacity, amount of each limit.

If none is acquired, the holder waits in the queue of each limit that refused. Safe to repeat after a lost answer.
Returns: acquired, the first limit that refused, the number of calls ahead there, and the ms until its oldest entry
leaves the window (-1: not known)."""

SETTLE = (
    _CLOCK
    + """
local holder, window, spent = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for i = 1, #KEYS / 4 do
    local members, sum, line, seen = KEYS[4*i-3], KEYS[4*i-2], KEYS[4*i-1], KEYS[4*i]
    local what, amount = ARGV[2*i+2], tonumber(ARGV[2*i+3])
    redis.call('ZREM', line, holder)
    redis.call('ZREM', seen, holder)
    if what == 'concurrency' then
        redis.call('ZREM', members, holder)
    elseif what == 'tokens' and spent >= 0 and spent ~= amount then
        local member = holder .. ' ' .. amount
        local at = redis.call('ZSCORE', members, member)
        if at then
            redis.call('ZREM', members, member)
            redis.call('ZADD', members, at, holder .. ' ' .. spent)
            redis.call('INCRBY', sum, spent - amount)
        elseif spent > amount then
            redis.call('ZADD', members, now, holder .. ' ' .. (spent - amount))
            redis.call('INCRBY', sum, spent - amount)
        end
        redis.call('PEXPIRE', members, window * 2)
        redis.call('PEXPIRE', sum, window * 2)
    end
end
"""
)
"""Settles a call. ARGV: holder, window in ms, tokens really used (-1: not known), then what, amount of each limit.

Releases the concurrency and the place in the queue. Tokens beyond the estimate count from the time of the call, or from
now if the call is older than the window."""

RENEW = (
    _CLOCK
    + """
local holder, lease, capacity = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZSCORE', KEYS[1], holder) or redis.call('ZCARD', KEYS[1]) < capacity then
    redis.call('ZADD', KEYS[1], now + lease, holder)
    redis.call('PEXPIRE', KEYS[1], lease * 2)
    return 1
end
return 0
"""
)
"""Renews a lease. KEYS: the members of one concurrency. ARGV: holder, lease in ms, capacity.

A lease that was lost with Redis' data is acquired again if there is room."""
