# No output may take the input with it, --force or not: the input's own folder, one above it, one that
# holds what its links name, or one that would be the unfinished output.
command -v qx-repack > /dev/null || { echo "qx-repack is not built" >&2; exit 77; }
mkdir -p hub/blobs hub/snapshots/one
cp -r "$SAMPLE"/. hub/blobs
for f in hub/blobs/*; do
    ln -s "../../blobs/${f##*/}" "hub/snapshots/one/${f##*/}"
done
cp -r "$SAMPLE" model.part
cp -r "$SAMPLE" plain
find hub model.part plain -type f -exec sha256sum {} + | sort > before
refused() { # IN OUT
    qx repack "$1" -o "$2" --force --no-resume -q > out 2> err
    rc=$?
    [ $rc = 2 ] && [ ! -s out ] && grep -q "never changed" err || echo "$1 -o $2: exit $rc: $(cat err)"
}
refused hub/snapshots/one hub/snapshots/one
refused hub/snapshots/one hub/snapshots
refused hub/snapshots/one hub
refused hub/snapshots/one hub/blobs
refused hub/snapshots/one hub/snapshots/one/new
refused model.part model
refused plain .
(cd plain && refused . ..)
rm plain/out plain/err
find hub model.part plain -type f -exec sha256sum {} + | sort | cmp - before
qx repack plain -o hub/snapshots/two -q > out 2> err || echo "beside the input: $(cat err)"
# --force replaces what qx could have written, nothing else.
mkdir precious
echo thesis > precious/thesis.txt
qx repack plain -o precious --force -q > out 2> err && echo "a folder of something else was replaced"
grep -q "neither a checkpoint nor an archive" err || cat err
grep -qx thesis precious/thesis.txt || echo "thesis.txt is gone"
