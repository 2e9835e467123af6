/* Faults of a file system, injected into a process and its children: gcc -shared -fPIC, LD_PRELOAD.

   Every call of libc's that names a path below one of the roots, or a descriptor opened there, is
   counted in a page of memory that all processes of a run share (the file `FAULT_STATE` names).
   While `armed`, the `at`-th call, and with `sticky` those after it, meets `action`. Calls that
   glibc makes inside itself pass unseen, so `opendir` and `readdir` are here beside `open`.

   The layout of `struct state` is repeated in injector.py. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { COUNT, FAIL, SHORT, KILL_BEFORE, KILL_AFTER, CLOCK };
/* What a call does, for faults that last: a full disk goes on being read. */
enum { READS = 1, WRITES = 2, OPENS = 4, LOCKS = 8 };
enum { ROOTS = 4, DESCRIPTORS = 4096 };

struct state {
  long armed, action, error, sticky, at, clock; /* set by the rig; clock: seconds to add */
  long calls, struck, slept;                    /* told to it; microseconds */
  char last[64];                                /* the name of the first call struck, */
  char path[256];                               /* and what it was about */
  char roots[ROOTS][256];
};

static struct state *state;
static unsigned char tracked[DESCRIPTORS];
static char names[DESCRIPTORS][96]; /* ends of paths, for `path` */

__attribute__((constructor)) static void attach(void) {
  const char *name = getenv("FAULT_STATE");
  if (!name) return;
  long fd = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  void *page = (void *)syscall(SYS_mmap, 0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (page != MAP_FAILED) state = page;
}

static int under_roots(const char *path) {
  for (int i = 0; i < ROOTS; i++) {
    size_t length = strlen(state->roots[i]);
    if (length && !strncmp(path, state->roots[i], length) &&
        (path[length] == '/' || !path[length]))
      return 1;
  }
  return 0;
}

static int known(int fd) { return state && fd >= 0 && fd < DESCRIPTORS && tracked[fd]; }

static int below(int folder, const char *path) {
  char here[4096];
  if (!state || !path) return 0;
  if (path[0] == '/') return under_roots(path);
  if (folder != AT_FDCWD) return known(folder);
  return syscall(SYS_getcwd, here, sizeof here) > 0 && under_roots(here);
}

static void track(int fd, const char *path) {
  if (fd < 0 || fd >= DESCRIPTORS) return;
  size_t length = strlen(path);
  tracked[fd] = 1;
  snprintf(names[fd], sizeof names[fd], "%s", length > 90 ? path + length - 90 : path);
}

static void untrack(int fd) {
  if (fd >= 0 && fd < DESCRIPTORS) tracked[fd] = 0;
}

static const char *name_of(int fd) { return known(fd) ? names[fd] : "?"; }

static void die(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); }

/* Count a call, and the action that it meets: COUNT lets it pass. FAIL has set errno. */
static int meet(int does, const char *name, const char *path) {
  if (!state->armed) return COUNT;
  long number = __sync_add_and_fetch(&state->calls, 1);
  int action = state->action;
  if (action == COUNT || action == CLOCK || number < state->at) return COUNT;
  if (number > state->at) {
    if (!state->sticky) return COUNT;
    int error = state->error;
    int wanted = error == ENOSPC || error == EROFS ? WRITES : error == EMFILE ? OPENS : ~0;
    if (!(does & wanted)) return COUNT;
  }
  if (action == SHORT && strcmp(name, "read") && strcmp(name, "write")) return COUNT;
  if (!__sync_fetch_and_add(&state->struck, 1)) {
    size_t length = strlen(path);
    snprintf(state->last, sizeof state->last, "%s", name);
    snprintf(state->path, sizeof state->path, "%s", length > 255 ? path + length - 255 : path);
  }
  if (action == KILL_BEFORE) die();
  if (action == FAIL) errno = state->error;
  return action;
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* A function that fails by returning -1. */
#define HOOK(name, parameters, arguments, told, is_below, does, path) \
  int name parameters { \
    REAL(name); \
    if (!(is_below)) return real arguments; \
    int met = meet(does, told, path); \
    if (met == FAIL) return -1; \
    int result = real arguments; \
    if (met == KILL_AFTER) die(); \
    return result; \
  }

#define OPEN(name, parameters, arguments, folder) \
  int name parameters { \
    REAL(name); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
      va_list rest; \
      va_start(rest, flags); \
      mode = va_arg(rest, mode_t); \
      va_end(rest); \
    } \
    if (!below(folder, path)) { \
      int other = real arguments; \
      untrack(other); /* what it was before was closed out of our sight */ \
      return other; \
    } \
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT; \
    int met = meet(OPENS | (writes ? WRITES : READS), "open", path); \
    if (met == FAIL) return -1; \
    int result = real arguments; \
    if (met == KILL_AFTER) die(); \
    track(result, path); \
    return result; \
  }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)

int close(int fd) {
  REAL(close);
  if (!known(fd)) return real(fd);
  int met = meet(WRITES, "close", name_of(fd));
  untrack(fd);
  int result = real(fd); /* a descriptor is gone whatever close says */
  if (met == KILL_AFTER) die();
  if (met == FAIL) {
    errno = state->error;
    return -1;
  }
  return result;
}

int close_range(unsigned first, unsigned last, int flags) {
  REAL(close_range);
  if (state && !(flags & CLOSE_RANGE_CLOEXEC))
    for (unsigned fd = first; fd <= last && fd < DESCRIPTORS; fd++) tracked[fd] = 0;
  return real(first, last, flags);
}

#define MOVE(name, type, parameters, arguments, told, does) \
  ssize_t name parameters { \
    REAL(name); \
    if (!known(fd)) return real arguments; \
    int met = meet(does, told, name_of(fd)); \
    if (met == FAIL) return -1; \
    if (met == SHORT && count > 1) count /= 2; \
    ssize_t result = real arguments; \
    if (met == KILL_AFTER) die(); \
    return result; \
  }

MOVE(read, void, (int fd, void *data, size_t count), (fd, data, count), "read", READS)
MOVE(pread, void, (int fd, void *data, size_t count, off_t at), (fd, data, count, at), "read", READS)
MOVE(pread64, void, (int fd, void *data, size_t count, off64_t at), (fd, data, count, at), "read", READS)
MOVE(write, const void, (int fd, const void *data, size_t count), (fd, data, count), "write", WRITES)
MOVE(pwrite, const void, (int fd, const void *data, size_t count, off_t at), (fd, data, count, at), "write", WRITES)
MOVE(pwrite64, const void, (int fd, const void *data, size_t count, off64_t at), (fd, data, count, at), "write", WRITES)
MOVE(sendfile, void, (int out, int fd, off_t *at, size_t count), (out, fd, at, count), "sendfile", READS)
MOVE(sendfile64, void, (int out, int fd, off64_t *at, size_t count), (out, fd, at, count), "sendfile", READS)
MOVE(copy_file_range, void, (int fd, off64_t *from, int out, off64_t *to, size_t count, unsigned flags),
     (fd, from, out, to, count, flags), "copy_file_range", READS)

#define PATH(name, does, parameters, arguments) \
  HOOK(name, parameters, arguments, #name, below(AT_FDCWD, path), does, path)
#define PATH_AT(name, does, parameters, arguments) \
  HOOK(name, parameters, arguments, #name, below(at, path), does, path)
#define DESCRIPTOR(name, does, parameters, arguments) \
  HOOK(name, parameters, arguments, #name, known(fd), does, name_of(fd))

PATH(stat, READS, (const char *restrict path, struct stat *restrict info), (path, info))
PATH(stat64, READS, (const char *restrict path, struct stat64 *restrict info), (path, info))
PATH(lstat, READS, (const char *restrict path, struct stat *restrict info), (path, info))
PATH(lstat64, READS, (const char *restrict path, struct stat64 *restrict info), (path, info))
DESCRIPTOR(fstat, READS, (int fd, struct stat *info), (fd, info))
DESCRIPTOR(fstat64, READS, (int fd, struct stat64 *info), (fd, info))
PATH_AT(fstatat, READS, (int at, const char *restrict path, struct stat *restrict info, int flags), (at, path, info, flags))
PATH_AT(fstatat64, READS, (int at, const char *restrict path, struct stat64 *restrict info, int flags), (at, path, info, flags))
PATH_AT(statx, READS, (int at, const char *restrict path, int flags, unsigned mask, struct statx *restrict info), (at, path, flags, mask, info))
PATH(access, READS, (const char *path, int mode), (path, mode))
PATH_AT(faccessat, READS, (int at, const char *path, int mode, int flags), (at, path, mode, flags))
PATH(chdir, READS, (const char *path), (path))
PATH(mkdir, WRITES, (const char *path, mode_t mode), (path, mode))
PATH_AT(mkdirat, WRITES, (int at, const char *path, mode_t mode), (at, path, mode))
PATH(rmdir, WRITES, (const char *path), (path))
PATH(unlink, WRITES, (const char *path), (path))
PATH_AT(unlinkat, WRITES, (int at, const char *path, int flags), (at, path, flags))
PATH(chmod, WRITES, (const char *path, mode_t mode), (path, mode))
PATH_AT(fchmodat, WRITES, (int at, const char *path, mode_t mode, int flags), (at, path, mode, flags))
DESCRIPTOR(fchmod, WRITES, (int fd, mode_t mode), (fd, mode))
DESCRIPTOR(fchown, WRITES, (int fd, uid_t user, gid_t group), (fd, user, group))
DESCRIPTOR(fsync, WRITES, (int fd), (fd))
DESCRIPTOR(fdatasync, WRITES, (int fd), (fd))
DESCRIPTOR(ftruncate, WRITES, (int fd, off_t size), (fd, size))
DESCRIPTOR(ftruncate64, WRITES, (int fd, off64_t size), (fd, size))
DESCRIPTOR(flock, LOCKS, (int fd, int operation), (fd, operation))
DESCRIPTOR(futimens, WRITES, (int fd, const struct timespec times[2]), (fd, times))
PATH_AT(utimensat, WRITES, (int at, const char *path, const struct timespec times[2], int flags), (at, path, times, flags))

#define TWO(name, parameters, arguments, from, to) \
  HOOK(name, parameters, arguments, #name, below(from, path) || below(to, other), WRITES, other)

TWO(rename, (const char *path, const char *other), (path, other), AT_FDCWD, AT_FDCWD)
TWO(renameat, (int at, const char *path, int to, const char *other), (at, path, to, other), at, to)
TWO(renameat2, (int at, const char *path, int to, const char *other, unsigned flags), (at, path, to, other, flags), at, to)
TWO(link, (const char *path, const char *other), (path, other), AT_FDCWD, AT_FDCWD)
TWO(linkat, (int at, const char *path, int to, const char *other, int flags), (at, path, to, other, flags), at, to)
TWO(symlink, (const char *path, const char *other), (path, other), AT_FDCWD, AT_FDCWD)

/* Taking locks alone: nothing else that fcntl does can fail. */
#define LOCK(name) \
  int name(int fd, int command, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, command); \
    void *argument = va_arg(rest, void *); \
    va_end(rest); \
    int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || \
                command == F_OFD_SETLKW; \
    if (!locks || !known(fd) || ((struct flock *)argument)->l_type == F_UNLCK) \
      return real(fd, command, argument); \
    int met = meet(LOCKS, "fcntl", name_of(fd)); \
    if (met == FAIL) return -1; \
    int result = real(fd, command, argument); \
    if (met == KILL_AFTER) die(); \
    return result; \
  }

LOCK(fcntl)
LOCK(fcntl64)

ssize_t readlink(const char *restrict path, char *restrict data, size_t size) {
  REAL(readlink);
  if (!below(AT_FDCWD, path)) return real(path, data, size);
  return meet(READS, "readlink", path) == FAIL ? -1 : real(path, data, size);
}

ssize_t readlinkat(int at, const char *restrict path, char *restrict data, size_t size) {
  REAL(readlinkat);
  if (!below(at, path)) return real(at, path, data, size);
  return meet(READS, "readlink", path) == FAIL ? -1 : real(at, path, data, size);
}

void *mmap(void *place, size_t size, int protection, int flags, int fd, off_t at) {
  REAL(mmap);
  if (known(fd) && meet(READS, "mmap", name_of(fd)) == FAIL) return MAP_FAILED;
  return real(place, size, protection, flags, fd, at);
}

void *mmap64(void *place, size_t size, int protection, int flags, int fd, off64_t at) {
  REAL(mmap64);
  if (known(fd) && meet(READS, "mmap", name_of(fd)) == FAIL) return MAP_FAILED;
  return real(place, size, protection, flags, fd, at);
}

DIR *opendir(const char *path) {
  REAL(opendir);
  if (!below(AT_FDCWD, path)) return real(path);
  if (meet(OPENS | READS, "opendir", path) == FAIL) return NULL;
  DIR *found = real(path);
  if (found) track(dirfd(found), path);
  return found;
}

DIR *fdopendir(int fd) {
  REAL(fdopendir);
  if (known(fd) && meet(OPENS | READS, "opendir", name_of(fd)) == FAIL) return NULL;
  return real(fd);
}

int closedir(DIR *folder) {
  REAL(closedir);
  untrack(dirfd(folder));
  return real(folder);
}

struct dirent *readdir(DIR *folder) {
  REAL(readdir);
  if (known(dirfd(folder)) && meet(READS, "readdir", name_of(dirfd(folder))) == FAIL) return NULL;
  return real(folder);
}

struct dirent64 *readdir64(DIR *folder) {
  REAL(readdir64);
  if (known(dirfd(folder)) && meet(READS, "readdir", name_of(dirfd(folder))) == FAIL) return NULL;
  return real(folder);
}

/* SQLite sleeps while it tries again, up to 10 s: that is counted, and not done. */
int usleep(useconds_t time) {
  REAL(usleep);
  if (!state || !state->armed) return real(time);
  __sync_fetch_and_add(&state->slept, time);
  return 0;
}

/* The wall clock: `clock` seconds off, with CLOCK from the `at`-th call on. */

static long shift(void) {
  if (!state || !state->armed) return 0;
  return state->action == CLOCK && state->calls < state->at ? 0 : state->clock;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime);
  int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  REAL(gettimeofday);
  int result = real(now, zone);
  if (!result) now->tv_sec += shift();
  return result;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
