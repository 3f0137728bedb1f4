/* completion.h: completion scripts. They ask each program for its options (--list-options) when a word
 * is completed, so that no list can go stale. */
#ifndef QX_CMD_COMPLETION_H
#define QX_CMD_COMPLETION_H

#include "str.h"

/* Appends the script for "bash", "zsh" or "fish"; false for another shell. */
bool completion_script(struct qx_buf *b, const char *shell);

#endif
