# Puts the packet rules of one installation's open networks in place, or prints why not. Safe to repeat.
# $1: prefix of its bridges' names; $2: a bridge that must be here (empty: remove the rules); $3: the rules.
set -eu
prefix=$1 bridge=$2 rules=$3

give_up() {
    echo "$*" >&2
    exit 1
}

listed() { "$1" -w 10 -t mangle -S; }

# Prints commands that remove the current rules of these bridges.
undoing() { # TOOL CHAIN-THAT-STAYS
    listed "$1" | sed -n -E "s/^-A (INPUT|FORWARD) (-i $prefix[+] -j .*)/-D \1 \2/p"
    listed "$1" | sed -n -E "s/^-N ($prefix-.*)/\1/p" | while read -r chain; do
        [ "$chain" = "$2" ] || printf -- '-F %s\n-X %s\n' "$chain" "$chain"
    done
}

in_place() { # TOOL CHAIN RULES
    now=$(listed "$1")
    [ "$(printf '%s\n' "$now" | grep -c -- "^-A $2 ")" = "$(printf '%s\n' "$3" | grep -c .)" ] || return 1
    hooks=$(printf '%s\n' "$now" | grep -- "^-A [A-Z]* -i $prefix+ " | sort)
    [ "$hooks" = "$(printf -- "-A FORWARD -i $prefix+ -j $2\n-A INPUT -i $prefix+ -j $2")" ]
}

put() { # TOOL RULES
    chain=$prefix-$(printf '%s' "$2" | sha256sum | cut -c 1-12)
    in_place "$1" "$chain" "$2" && return
    {
        printf '*mangle\n:%s - [0:0]\n' "$chain"
        printf '%s\n' "$2" | sed "s/^/-A $chain /"
        undoing "$1" "$chain"
        printf -- "-I %s 1 -i $prefix+ -j $chain\n" INPUT FORWARD
        echo COMMIT
    } | "$1-restore" -w 10 --noflush || : # another process may have been first
    in_place "$1" "$chain" "$2" || give_up "$1 did not take the rules"
}

take_away() { # TOOL
    gone=$(undoing "$1" "")
    [ -z "$gone" ] || printf '*mangle\n%s\nCOMMIT\n' "$gone" | "$1-restore" -w 10 --noflush
}

tools=iptables
[ ! -e /proc/net/if_inet6 ] || tools="iptables ip6tables"
for tool in $tools; do
    command -v "$tool" >/dev/null || give_up "$tool is not installed on the engine's host"
done

if [ -z "$bridge" ]; then
    for tool in $tools; do take_away "$tool"; done
    exit 0
fi
grep -q "^ *$bridge:" /proc/net/dev || give_up "no interface $bridge: this is not the network of the engine's host"

# Accepts replies, and packets between containers of one network: the engine's own rules decide about those.
before="-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-m physdev --physdev-is-bridged -j ACCEPT"
# Accepts DNS to the resolvers that an engine gives to containers: those of its host, except on its loopback.
for resolver in $(cat /etc/resolv.conf /run/systemd/resolve/resolv.conf 2>/dev/null |
    sed -n -E 's/^nameserver[ \t]+([0-9.]+)[ \t]*$/\1/p' | grep -v '^127[.]' | sort -u); do
    before="$before
-d $resolver -p udp -m udp --dport 53 -j ACCEPT
-d $resolver -p tcp -m tcp --dport 53 -j ACCEPT"
done
put iptables "$before
$rules"
[ "$tools" = iptables ] || put ip6tables "-j DROP" # open networks have no IPv6
