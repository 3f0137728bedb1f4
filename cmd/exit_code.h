/* exit_code.h: the exit codes of every program, once. 128+n is a death by signal n, re-raised. */
#ifndef QX_CMD_EXIT_CODE_H
#define QX_CMD_EXIT_CODE_H
enum { EXIT_OK = 0, EXIT_FINDINGS = 1, EXIT_USAGE = 2, EXIT_INPUT = 3, EXIT_RESOURCE = 4 };
#endif
