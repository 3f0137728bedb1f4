/* opt.h: one array of options per command gives parsing, -h, --help, completion words and "did you
 * mean". Over getopt_long; free order, --, --opt=value, no abbreviations, --no-x for switches. */
#ifndef QX_CMD_OPT_H
#define QX_CMD_OPT_H

#include "base.h"
#include "num.h"

enum opt_type {
    OPT_FLAG,   /* bool; --no-NAME clears it */
    OPT_COUNT,  /* unsigned, counts repeats (-vv) */
    OPT_STR,    /* const char * */
    OPT_STRS,   /* struct opt_strs: may be given several times */
    OPT_U64,    /* uint64_t */
    OPT_F64,    /* double */
    OPT_SIZE,   /* uint64_t bytes */
    OPT_LIST,   /* struct qx_u64_list; LIST, @FILE, - for stdin; `kind` names range errors */
    OPT_CHOICE, /* const char *, one of choices (NULL-terminated) */
    OPT_OPTSTR, /* const char *: argument optional with =, else "" (e.g. --tensors[=GLOB]) */
    OPT_GROUP,  /* heading in --help; help is its title */
    OPT_END
};
struct opt_strs { const char *v[64]; size_t n; };
struct opt {
    enum opt_type type;
    char letter;             /* 0: none */
    const char *name;        /* without dashes */
    const char *arg;         /* "N", "FILE", ... */
    void *dest;
    bool *given;             /* set when the option occurred, may be NULL */
    const char *help;
    const char *const *choices;
    const char *kind;        /* OPT_LIST: kind of a range error */
};
struct opt_command {
    const char *name;        /* "inspect" */
    const char *synopsis;    /* lines, equal to the manual's SYNOPSIS */
    const char *summary;     /* one line */
    const char *examples;    /* for -h */
    const struct opt *opts;  /* ends with OPT_END */
    int min_args, max_args;
};

/* Options every command has; call opt_common_fill for the array entries to include. */
struct opt_common {
    bool json, quiet;
    unsigned verbose;
    const char *color, *progress; /* auto, always, never */
    uint64_t threads;             /* 0: all */
};
/* Array entries of the common group, to be placed in a command's array. */
#define OPT_COMMON(c)                                                                             \
    {OPT_GROUP, 0, 0, 0, 0, 0, "General", 0, 0},                                                  \
    {OPT_FLAG, 0, "json", 0, &(c).json, 0, "machine output (see qx-json(5))", 0, 0},              \
    {OPT_FLAG, 'q', "quiet", 0, &(c).quiet, 0, "only errors on standard error", 0, 0},            \
    {OPT_COUNT, 'v', "verbose", 0, &(c).verbose, 0, "say more; twice: much more", 0, 0},          \
    {OPT_CHOICE, 0, "color", "WHEN", &(c).color, 0, "auto, always or never", opt_when, 0},        \
    {OPT_CHOICE, 0, "progress", "WHEN", &(c).progress, 0, "auto, always or never", opt_when, 0},  \
    {OPT_U64, 'j', "threads", "N", &(c).threads, 0, "worker threads (default: all processors)", 0, 0}
extern const char *const opt_when[];

/* Parses argv; options --device and --threads default to QX_DEVICE and QX_THREADS. Returns -1 to go on with *args/n_args set, or an exit code: 0 after --help, --version,
 * --list-options; 2 after a wrong command line (one line on stderr, nothing on stdout). A bad LIST
 * item prints its kind in the message. */
int opt_parse(const struct opt_command *cmd, int argc, char **argv, char ***args, int *n_args);

#endif
