/* What the environment uses, as far as its control group is visible from inside. */
#include "helper.h"

/* The first line's number, or the number after `key`. */
static bool number_at(const char *path, const char *key, unsigned long long *value) {
    FILE *file = fopen(path, "re");
    char line[256];
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        size_t n = key ? strlen(key) : 0;
        if (key && (strncmp(line, key, n) || line[n] != ' ')) continue;
        char *end;
        *value = strtoull(line + n, &end, 10);
        found = end != line + n;
        if (!key) break;
    }
    if (file) fclose(file);
    return found;
}

/* This process's group in the hierarchy of `controller` ("" is the unified one); "" when it is the root. */
static void group_of(const char *controller, char *to, size_t room) {
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[4096];
    *to = 0;
    while (file && fgets(line, sizeof line, file)) {
        char *rest = line;
        strsep(&rest, ":");
        char *names = strsep(&rest, ":");
        if (!rest) continue;
        rest[strcspn(rest, "\n")] = 0;
        bool here = !*controller && !*names;
        for (char *one; *controller && names && (one = strsep(&names, ","));) here |= !strcmp(one, controller);
        if (here) snprintf(to, room, "%s", strcmp(rest, "/") ? rest : "");
    }
    if (file) fclose(file);
}

static bool in_group(const char *mount, const char *controller, const char *name, const char *key,
                     unsigned long long *value) {
    char group[2048], path[4096];
    group_of(controller, group, sizeof group);
    snprintf(path, sizeof path, "%s%s/%s", mount, group, name);
    if (number_at(path, key, value)) return true;
    snprintf(path, sizeof path, "%s/%s", mount, name); /* a container whose own group is mounted as the root */
    return number_at(path, key, value);
}

static void tell(char *text, size_t *at, const char *name, unsigned long long value) {
    *at += (size_t)sprintf(text + *at, "%s %llu\n", name, value);
}

void stats_request(void) {
    static const char v2[] = "/sys/fs/cgroup", memory[] = "/sys/fs/cgroup/memory", cpu[] = "/sys/fs/cgroup/cpuacct";
    char text[512];
    size_t at = 0;
    unsigned long long n;
    tell(text, &at, "processes", tree_count());
    if (in_group(v2, "", "memory.current", NULL, &n) || in_group(memory, "memory", "memory.usage_in_bytes", NULL, &n))
        tell(text, &at, "memory_bytes", n);
    if (in_group(v2, "", "memory.peak", NULL, &n) || in_group(memory, "memory", "memory.max_usage_in_bytes", NULL, &n))
        tell(text, &at, "memory_peak_bytes", n);
    if (in_group(v2, "", "cpu.stat", "usage_usec", &n)) tell(text, &at, "cpu_us", n);
    else if (in_group(cpu, "cpuacct", "cpuacct.usage", NULL, &n)) tell(text, &at, "cpu_us", n / 1000);
    if (in_group(v2, "", "memory.events", "oom_kill", &n) || in_group(memory, "memory", "memory.oom_control", "oom_kill", &n))
        tell(text, &at, "oom_kills", n);
    wire_send(OK, text, at);
}
