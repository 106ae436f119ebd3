/* Surroundings that go wrong, for `lightscale chaos`: loaded before the C library (LD_PRELOAD) into launcher and ranks.

   The harness writes numbers into a mapped file (control.py), one row for each rank and one for every other process, and
   takes them back. A row of zeros changes nothing. LIGHTSCALE_CHAOS_CONTROL names the file, LIGHTSCALE_CHAOS_RUN and
   LIGHTSCALE_CHAOS_STORE the directories that the numbers are about. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CLOCK_OFFSET_S, SEND_PAUSE_S, SEND_STALL, READ_STALL, WRITE_PAUSE_S, READ_ONLY, LYING, NUM_FIELDS };
enum { NUM_RANKS = 64, NUM_ROWS = NUM_RANKS + 1, MOST_FILES = 1 << 16 };
enum { OTHER = 0, RUN, STORE };

static volatile double *rows;
static char run_directory[PATH_MAX], store_directory[PATH_MAX], control_path[PATH_MAX];
/* What a file descriptor is of. Descriptors that the C library opens for itself are OTHER. */
static unsigned char kinds[MOST_FILES];

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void copy_variable(char *to, const char *name) {
    const char *value = getenv(name);
    snprintf(to, PATH_MAX, "%s", value ? value : "");
}

__attribute__((constructor)) static void begin(void) {
    copy_variable(control_path, "LIGHTSCALE_CHAOS_CONTROL");
    copy_variable(run_directory, "LIGHTSCALE_CHAOS_RUN");
    copy_variable(store_directory, "LIGHTSCALE_CHAOS_STORE");
    int file = (int)openat(AT_FDCWD, control_path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, NUM_ROWS * NUM_FIELDS * sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) rows = mapped;
}

/* Asked at every call: forks of the launcher become ranks by a variable that they set later. */
static double field(int number) {
    if (!rows) return 0;
    const char *rank = getenv("RANK");
    int row = rank && *rank ? atoi(rank) : NUM_RANKS;
    if (row < 0 || row > NUM_RANKS) row = NUM_RANKS;
    return rows[row * NUM_FIELDS + number];
}

static void pause_for(double seconds) {
    if (seconds <= 0) return;
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&left, NULL);
}

static void wait_while(int number) {
    while (field(number) != 0) pause_for(0.01);
}

static int is_below(const char *path, const char *directory) {
    size_t length = strlen(directory);
    return length && !strncmp(path, directory, length) && (path[length] == '/' || path[length] == 0);
}

static int kind_of_path(const char *path) {
    return is_below(path, run_directory) ? RUN : is_below(path, store_directory) ? STORE : OTHER;
}

static int kind_of(int file) { return file >= 0 && file < MOST_FILES ? kinds[file] : OTHER; }

/* The name of `path` from the root on, without following links. */
static void whole_path(int folder, const char *path, char *out) {
    char link[64], from[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(from, sizeof from)) from[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, from, sizeof from - 1);
        from[length > 0 ? length : 0] = 0;
    }
    if (snprintf(out, PATH_MAX, "%s/%s", from, path) >= PATH_MAX) out[0] = 0;
}

static int is_read_only(int folder, const char *path) {
    char whole[PATH_MAX];
    if (!rows || field(READ_ONLY) == 0) return 0;
    whole_path(folder, path, whole);
    if (kind_of_path(whole) != RUN) return 0;
    errno = EROFS;
    return 1;
}

/* --- a disk that lies: what was written since the last fsync is noted, so that the harness can lose it --------------- */

static void note(const char *format, ...) {
    static int file = -1;
    char line[3 * PATH_MAX + 64];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line, format, arguments), before = errno;
    va_end(arguments);
    if (file < 0) {
        char path[PATH_MAX + 16];
        snprintf(path, sizeof path, "%s.journal", control_path);
        file = openat(AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    REAL(write);
    /* One call for one line: lines of several processes do not mix. */
    if (length > 0 && real(file, line, (size_t)length) < 0) abort();
    errno = before;
}

static unsigned long number_of(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : (unsigned long)status.st_ino;
}

static unsigned long number_of_parent(const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    return number_of(parent);
}

/* A second name for what a rename or an unlink destroys. "" where there is nothing. */
static void keep(const char *path, char *out) {
    static unsigned count;
    snprintf(out, PATH_MAX, "%.3900s.kept-%d-%u", control_path, (int)getpid(), __sync_add_and_fetch(&count, 1));
    struct stat status;
    if (lstat(path, &status) || !S_ISREG(status.st_mode) || linkat(AT_FDCWD, path, AT_FDCWD, out, 0)) out[0] = 0;
}

static int lies_about(int folder, const char *path, char *whole) {
    if (!rows || field(LYING) == 0) return 0;
    whole_path(folder, path, whole);
    return kind_of_path(whole) == RUN;
}

static void before_write(int file) {
    struct stat status;
    if (kind_of(file) != RUN || !rows) return;
    pause_for(field(WRITE_PAUSE_S));
    if (field(LYING) != 0 && !fstat(file, &status) && S_ISREG(status.st_mode))
        note("W %lu %lld\n", (unsigned long)status.st_ino, (long long)status.st_size);
}

static int may_not_write(int file) {
    if (kind_of(file) != RUN || !rows || field(READ_ONLY) == 0) return 0;
    errno = EROFS;
    return 1;
}

static void before_send(int file) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (!rows || (field(SEND_PAUSE_S) == 0 && field(SEND_STALL) == 0)) return;
    int before = errno;
    if (!getsockname(file, (struct sockaddr *)&address, &length) &&
        (address.ss_family == AF_INET || address.ss_family == AF_INET6)) {
        pause_for(field(SEND_PAUSE_S));
        wait_while(SEND_STALL);
    }
    errno = before;
}

/* --- opening and closing ------------------------------------------------------------------------------------------- */

static int opened(int file) {
    char link[64], path[PATH_MAX];
    if (file < 0 || file >= MOST_FILES) return file;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    kinds[file] = (unsigned char)kind_of_path(path);
    errno = before;
    return file;
}

static int open_any(__typeof__(&openat) real, int folder, const char *path, int flags, mode_t mode) {
    char whole[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT);
    if (writes && is_read_only(folder, path)) return -1;
    int is_new = (flags & O_CREAT) && lies_about(folder, path, whole) && !number_of(whole);
    int file = opened(real(folder, path, flags, mode));
    if (file >= 0 && is_new) note("C %lu %lu\t%s\n", number_of_parent(whole), number_of(whole), whole);
    return file;
}

static __typeof__(&openat) real_openat(void) {
    REAL(openat);
    return real;
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

int open(const char *path, int flags, ...) { MODE return open_any(real_openat(), AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_any(real_openat(), AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return open_any(real_openat(), folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return open_any(real_openat(), folder, path, flags, mode); }

int close(int file) {
    REAL(close);
    if (file >= 0 && file < MOST_FILES) kinds[file] = OTHER;
    return real(file);
}

/* --- names --------------------------------------------------------------------------------------------------------- */

static int rename_any(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    char whole_from[PATH_MAX], whole_to[PATH_MAX], kept[PATH_MAX] = "";
    if (is_read_only(from_folder, from) || is_read_only(to_folder, to)) return -1;
    int lies = lies_about(from_folder, from, whole_from) && lies_about(to_folder, to, whole_to);
    if (lies) keep(whole_to, kept);
    int result = real(from_folder, from, to_folder, to);
    if (lies && !result)
        note("R %lu %lu\t%s\t%s\t%s\n", number_of_parent(whole_to), number_of(whole_to), whole_from, whole_to, kept);
    return result;
}

int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to); }

static int unlink_any(int folder, const char *path, int flags) {
    REAL(unlinkat);
    char whole[PATH_MAX], kept[PATH_MAX] = "";
    if (is_read_only(folder, path)) return -1;
    int lies = !(flags & AT_REMOVEDIR) && lies_about(folder, path, whole);
    if (lies) keep(whole, kept);
    int result = real(folder, path, flags);
    if (lies && !result && kept[0]) note("U %lu 0\t%s\t%s\n", number_of_parent(whole), whole, kept);
    return result;
}

int unlink(const char *path) { return unlink_any(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return unlink_any(folder, path, flags); }
int rmdir(const char *path) { return unlink_any(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return is_read_only(AT_FDCWD, path) ? -1 : real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    return is_read_only(folder, path) ? -1 : real(folder, path, mode);
}

/* --- writing and sending ------------------------------------------------------------------------------------------- */

static int synced(int file, int result) {
    struct stat status;
    if (!result && kind_of(file) == RUN && rows && field(LYING) != 0 && !fstat(file, &status))
        note("S %lu\n", (unsigned long)status.st_ino);
    return result;
}

int fsync(int file) {
    REAL(fsync);
    if (may_not_write(file)) return -1;
    if (kind_of(file) == RUN) pause_for(field(WRITE_PAUSE_S));
    return synced(file, real(file));
}

int fdatasync(int file) {
    REAL(fdatasync);
    if (may_not_write(file)) return -1;
    if (kind_of(file) == RUN) pause_for(field(WRITE_PAUSE_S));
    return synced(file, real(file));
}

#define WRITES(name, parameters, values) \
    ssize_t name parameters { \
        REAL(name); \
        if (may_not_write(file)) return -1; \
        before_write(file); \
        before_send(file); \
        return real values; \
    }

WRITES(write, (int file, const void *data, size_t size), (file, data, size))
WRITES(writev, (int file, const struct iovec *parts, int count), (file, parts, count))
WRITES(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITES(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRITES(send, (int file, const void *data, size_t size, int flags), (file, data, size, flags))
WRITES(sendmsg, (int file, const struct msghdr *message, int flags), (file, message, flags))

/* --- reading ------------------------------------------------------------------------------------------------------- */

#define READS(name, parameters, values) \
    ssize_t name parameters { \
        REAL(name); \
        if (kind_of(file) == STORE) wait_while(READ_STALL); \
        return real values; \
    }

READS(read, (int file, void *data, size_t size), (file, data, size))
READS(pread, (int file, void *data, size_t size, off_t at), (file, data, size, at))
READS(pread64, (int file, void *data, size_t size, off64_t at), (file, data, size, at))
READS(preadv, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
READS(preadv64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
READS(preadv2, (int file, const struct iovec *parts, int count, off_t at, int flags), (file, parts, count, at, flags))
READS(preadv64v2, (int file, const struct iovec *parts, int count, off64_t at, int flags), (file, parts, count, at, flags))

/* --- the clock ----------------------------------------------------------------------------------------------------- */

/* Only where it is read: a wait until a time of day would need the kernel's clock. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && clock == CLOCK_REALTIME && rows) now->tv_sec += (time_t)field(CLOCK_OFFSET_S);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);
    if (!result && rows) now->tv_sec += (time_t)field(CLOCK_OFFSET_S);
    return result;
}

time_t time(time_t *out) {
    REAL(time);
    time_t now = real(NULL) + (rows ? (time_t)field(CLOCK_OFFSET_S) : 0);
    if (out) *out = now;
    return now;
}
