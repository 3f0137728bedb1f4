/* signals.c: owns the process's signal flag. Handlers only set it, or end the process the second
 * time. */
#include "signals.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t pending;
static const char *volatile temp_path;

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
