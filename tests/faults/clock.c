/* Preloaded into a process: its wall clock differs from the machine's by the microseconds, a 64-bit integer, that are in
 * the file POSTDATE_TEST_CLOCK. Another process may set it at any time. Clocks that only count are left alone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void find_the_file(void) {
    const char *path = getenv("POSTDATE_TEST_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page == MAP_FAILED) abort(); /* a test must not believe in a clock that is not shifted */
    ahead = page;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = (int)syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && ahead != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t microseconds = time->tv_nsec / 1000 + *ahead % 1000000;
        time->tv_sec += *ahead / 1000000 + (microseconds >= 1000000) - (microseconds < 0);
        time->tv_nsec = time->tv_nsec % 1000 + (microseconds + 1000000) % 1000000 * 1000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    time->tv_sec = precise.tv_sec;
    time->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (result != NULL) *result = precise.tv_sec;
    return precise.tv_sec;
}
