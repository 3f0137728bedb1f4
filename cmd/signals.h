/* signals.h: SIGINT, SIGTERM and SIGHUP set a flag; a second one ends the process at once. */
#ifndef QX_CMD_SIGNALS_H
#define QX_CMD_SIGNALS_H

#include "base.h"

/* Installs the handlers (a signal that was ignored at the start stays ignored). SIGBUS, which a mapped
 * file gives that is cut while in use, becomes a message and the exit code of unusable input. */
void signals_init(void);
/* With --json: that failure is a qx.error/1 object on stdout too. */
void signals_json_errors(bool on);
/* The first signal that arrived, 0 if none. Async-safe and cheap. */
int signals_pending(void);
/* Forgets a SIGINT that has been dealt with (chat: the answer was stopped). */
void signals_clear(void);
/* Registers a path to unlink when the process is ended by a second signal; NULL removes it. The string
 * must stay valid. One at a time. */
void signals_temp_path(const char *path);
/* Ends the process by `sig` with its default action, so that the shell sees it. Does not return. */
_Noreturn void signals_reraise(int sig);

#endif
