/* A zstd file with a seek table: what opens has frames that lie in the file one after another, reads by
 * frame and by range agree, and no declared size makes it allocate beyond its limits. */
#include "fuzz.h"

#include "zseek.h"

#define LARGEST ((uint64_t)1 << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint64_t live = qx_alloc_live();
    int fd = fuzz_file(data, size);
    struct qx_zseek *z;
    struct qx_error err = {0};
    int rc = qx_zseek_open(&z, fd, size, "f", &err);
    CHECK(rc == 0 || (!z && err.kind && err.msg[0]));
    if (rc == 0) {
        uint64_t off = 0, content = 0;
        for (size_t i = 0; i < qx_zseek_n_frames(z); i++) {
            const struct qx_zseek_frame *f = qx_zseek_frame(z, i);
            CHECK(f->off == off && f->data_off == content && f->size <= size - off);
            CHECK(f->data_size <= QX_ZSEEK_MAX_CONTENT);
            off += f->size;
            content += f->data_size;
        }
        CHECK(content == qx_zseek_content_bytes(z));
        if (content <= LARGEST) {
            uint8_t *whole = malloc(content ? content : 1), *part = malloc(content ? content : 1);
            CHECK(whole && part);
            rc = 0;
            for (size_t i = 0; i < qx_zseek_n_frames(z) && !rc; i++) {
                rc = qx_zseek_read_frame(z, i, whole + qx_zseek_frame(z, i)->data_off, &err);
            }
            CHECK((qx_zseek_read(z, 0, part, content, NULL) == 0) == (rc == 0));
            CHECK(rc || content == 0 || memcmp(whole, part, content) == 0);
            if (!rc && content > 2) {
                CHECK(qx_zseek_read(z, content / 3, part, content / 3, NULL) == 0);
                CHECK(memcmp(whole + content / 3, part, content / 3) == 0);
            }
            free(whole);
            free(part);
        }
        qx_zseek_close(z);
    }
    CHECK(qx_alloc_live() == live);
    return 0;
}
