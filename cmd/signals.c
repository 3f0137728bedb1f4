/* signals.c: owns the process's signal flag. Handlers only set it, or end the process the second
 * time; SIGBUS from a mapped file that was cut ends it with a message. */
#include "signals.h"

#include "exit_code.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t pending;
static const char *volatile temp_path;
static volatile sig_atomic_t json_errors;

static void on_signal(int sig)
{
    if (pending) {
        const char *path = temp_path;
        if (path) {
            unlink(path);
        }
        signal(sig, SIG_DFL);
        raise(sig);
        return;
    }
    pending = sig;
}

/* A mapped file was cut or its medium failed: what was to be computed from it cannot be. Nothing but
 * async-safe calls here. */
static void on_bus_error(int sig)
{
    static const char text[] = "qx: file-changed: a mapped file of the checkpoint was cut or cannot be read any "
                               "more\n";
    static const char json[] = "{\"schema\": \"qx.error/1\", \"kind\": \"file-changed\", \"text\": \"a mapped "
                               "file of the checkpoint was cut or cannot be read any more\", \"file\": null, "
                               "\"tensor\": null, \"offset\": null}\n";
    const char *path = temp_path;
    ssize_t n = write(STDERR_FILENO, text, sizeof text - 1);
    (void)sig;
    if (json_errors) {
        n = write(STDOUT_FILENO, json, sizeof json - 1);
    }
    (void)n;
    if (path) {
        unlink(path);
    }
    _exit(EXIT_INPUT);
}

void signals_json_errors(bool on)
{
    json_errors = on;
}

void signals_init(void)
{
    static const int sigs[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < QX_ARRAY_LEN(sigs); i++) {
        struct sigaction old, sa;
        memset(&sa, 0, sizeof sa);
        sa.sa_handler = on_signal;
        sigemptyset(&sa.sa_mask);
        sa.sa_flags = 0; /* reads are interrupted: a prompt notices */
        if (sigaction(sigs[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN) {
            sigaction(sigs[i], &sa, NULL);
        }
    }
    struct sigaction bus;
    memset(&bus, 0, sizeof bus);
    bus.sa_handler = on_bus_error;
    sigemptyset(&bus.sa_mask);
    sigaction(SIGBUS, &bus, NULL);
}

int signals_pending(void)
{
    return pending;
}

void signals_clear(void)
{
    pending = 0;
}

void signals_temp_path(const char *path)
{
    temp_path = path;
}

_Noreturn void signals_reraise(int sig)
{
    sigset_t set;
    signal(sig, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, sig);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(sig);
    _exit(128 + sig);
}
