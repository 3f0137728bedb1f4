/* Signals as a shell sees them: a mapped file that is cut gives a message and exit code 3, not a death by
 * SIGBUS; the first SIGTERM sets the flag, the second ends the process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "exit_code.h"
#include "file_map.h"
#include "signals.h"

/* Runs fn in a child with stdout and stderr in one pipe; returns the wait status and the text. */
static int in_child(void (*fn)(void), char *text, size_t cap)
{
    int fds[2], status;
    assert_int_equal(pipe(fds), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], STDOUT_FILENO);
        dup2(fds[1], STDERR_FILENO);
        close(fds[0]);
        fn();
        _exit(99);
    }
    close(fds[1]);
    size_t n = 0;
    for (ssize_t k; n + 1 < cap && (k = read(fds[0], text + n, cap - 1 - n)) > 0; n += (size_t)k) {
    }
    text[n] = '\0';
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void cut_map(void)
{
    char path[] = "/tmp/qx-test-XXXXXX";
    struct qx_map m;
    int fd = mkstemp(path);
    signals_init();
    signals_json_errors(true);
    unlink(path);
    if (fd < 0 || ftruncate(fd, 1 << 20) != 0 || qx_map_open(&m, fd, 1 << 20, NULL) != 0 || ftruncate(fd, 10) != 0) {
        _exit(98);
    }
    volatile unsigned char sum = 0;
    for (size_t i = 0; i < 1 << 20; i += 4096) {
        sum = (unsigned char)(sum + m.p[i]);
    }
}

static void twice(void)
{
    signals_init();
    raise(SIGTERM);
    if (signals_pending() != SIGTERM) {
        _exit(97);
    }
    raise(SIGTERM);
}

static void file_cut_while_mapped(void **state)
{
    (void)state;
    char text[1024];
    int status = in_child(cut_map, text, sizeof text);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), EXIT_INPUT);
    assert_non_null(strstr(text, "file-changed"));
    assert_non_null(strstr(text, "\"schema\": \"qx.error/1\""));
}

static void second_signal_ends(void **state)
{
    (void)state;
    char text[1024];
    int status = in_child(twice, text, sizeof text);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(file_cut_while_mapped),
                                       cmocka_unit_test(second_signal_ends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
