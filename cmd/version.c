/* version.c: versions of this build and of the libraries that it runs with. */
#include "version.h"

#include "qx.h"
#include "qx_build.h"
#include "qx_commit.h"

#include <utf8proc.h>
#include <xxhash.h>
#include <zstd.h>
#if QX_HAVE_SHA256
#include <openssl/crypto.h>
#endif

void version_text(struct qx_buf *b, const char *program)
{
    unsigned xxh = XXH_versionNumber();
    qx_buf_fmt(b, "%s %s (commit %s)\n", program, QX_VERSION, QX_COMMIT);
    qx_buf_fmt(b, "build: %s, %s\n", QX_BUILD_FEATURES, __VERSION__);
    qx_buf_fmt(b, "libraries: zstd %s, xxHash %u.%u.%u, utf8proc %s (Unicode %s)",
               ZSTD_versionString(), xxh / 10000, xxh / 100 % 100, xxh % 100,
               utf8proc_version(), utf8proc_unicode_version());
#if QX_HAVE_SHA256
    qx_buf_fmt(b, ", %s", OpenSSL_version(OPENSSL_VERSION));
#endif
    qx_buf_chr(b, '\n');
}
