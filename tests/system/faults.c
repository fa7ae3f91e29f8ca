/* Faults of the machine for one process and its children, loaded before libc (LD_PRELOAD).

   FAULT_CLOCK    a file of 8 bytes, a little-endian int64: seconds to add to the wall clock, which
                  may change while the process runs. Other clocks tell the truth.
   FAULT_MEMINFO  a file that is read in place of /proc/meminfo while it exists. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void map_clock(void) {
    const char *file = getenv("FAULT_CLOCK");
    int fd = file ? (int)syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *place = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, fd, 0);
    if (place != MAP_FAILED)
        offset_s = place;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int status = (int)syscall(SYS_clock_gettime, id, now);
    if (status == 0 && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out)
        *out = exact.tv_sec;
    return exact.tv_sec;
}

static const char *read_instead(const char *path) {
    const char *file = getenv("FAULT_MEMINFO");
    struct stat found;
    if (file && strcmp(path, "/proc/meminfo") == 0 && stat(file, &found) == 0)
        return file;
    return path;
}

static int open_at(int folder, const char *path, int flags, va_list rest) {
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    return (int)syscall(SYS_openat, folder, read_instead(path), flags, mode);
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int fd = open_at(AT_FDCWD, path, flags, rest); \
        va_end(rest); \
        return fd; \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int fd = open_at(folder, path, flags, rest); \
        va_end(rest); \
        return fd; \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
