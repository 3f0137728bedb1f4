/* commands.h: the one table of commands. Front door, help, completion and tests read it. */
#ifndef QX_CMD_COMMANDS_H
#define QX_CMD_COMMANDS_H

struct command {
    const char *name, *summary;
};

static const struct command commands[] = {
    {"inspect", "show what a checkpoint holds and how each part will be read"},
    {"verify", "check that a checkpoint is whole and sound"},
    {"decode-rows", "print rows of a stored matrix as numbers"},
    {"repack", "write a new checkpoint with parts stored differently"},
    {"run", "generate text"},
    {"bench", "measure speed against the limit of the device"},
};

#endif
