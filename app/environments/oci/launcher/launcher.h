/* Starts one environment: a small program without libraries in the place of a general runtime.
 *
 * It is given a list of steps (see main.c) and takes them in order, the first ones as root of the host, those after
 * `born` as the first process of the environment, which in the end becomes the session's helper. What is done, and in
 * which order, is said by the list alone: steps.py makes it of the same specification that crun would get.
 */
#pragma once
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Files that we are started with. 0 and 1 are unused, 2 takes our words. */
enum { LISTENING = 3, PLAN, PLAIN_MOUNTS, TRANSLATION, FILTER, OWN_FROM };

/* Exit codes. What is read are our last words: `started PID`, `lacking PATH`, or `failed ERRNO STEP ABOUT: WHY`. */
enum { DONE, FAILED };

/* Say what failed, with errno's meaning, and end. For the environment's first process its parent says it. */
_Noreturn void fail(const char *step, const char *about);
/* The same for what was told wrong. */
_Noreturn void fail_because(const char *step, const char *about, const char *why);

/* --- files.c: inside of a folder, as if it were / --------------------------------------------------------------- */

extern int root; /* the environment's file system */

/* Open PATH inside of the root; -1 with errno. `plain`: no link on the way. */
int open_inside(const char *path, int flags, bool plain);
/* Make the folder and its parents where they are missing, for `owner`. Links are followed inside, also to nowhere. */
void make_folders(const char *step, const char *path, uid_t owner);
/* What a file descriptor can be called by as long as it is open. */
const char *name_of(int fd);
void write_to(const char *step, const char *path, const char *text);

/* --- mounts.c --------------------------------------------------------------------------------------------------- */

/* Leave the mounts that are ready for us with a copy of our own. */
void mounts_apart(void);
/* The host's folder at TARGET, its owners translated to what those inside have out here. */
void mount_translated(const char *folder, const char *target);
/* OPTIONS name the layers as seen from BASE. */
void mount_overlay(const char *base, const char *target, const char *options);
/* `root` is what is mounted at TARGET. */
void open_root(const char *target);
/* The same in the new namespace, as a mount that may become its root. */
void own_root(const char *target);
/* A folder of the host at PATH inside, to be read. */
void show(const char *folder, const char *path);
/* A file system of its own, or a part of the host's, at PATH inside. */
void mount_new(const char *kind, const char *source, const char *path, unsigned long flags, const char *options);
void mount_bound(const char *source, const char *path, unsigned long flags);
/* A device of the host, or a link, at PATH inside. */
void device(const char *source, const char *path);
void link_to(const char *target, const char *path);
/* Read-only; empty; read-only from there down. What is not there need not be hidden or frozen. */
void protect(const char *path);
void hide(const char *path);
void freeze(const char *path);
/* Make `root` the root, and lose sight of everything else. */
void enter(bool read_only);

/* --- confine.c -------------------------------------------------------------------------------------------------- */

void limit(int which, const char *value);
void loopback(void);
/* Give up what is not wanted for good: all capabilities but `kept` (bits), new privileges, forbidden calls. */
void confine(uint64_t kept);
