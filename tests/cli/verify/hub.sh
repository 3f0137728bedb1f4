# The checksums of a hub download: links to blobs in the cache, records in a folder downloaded into.
git_id() { { printf 'blob %s\0' "$(stat -c %s "$1")"; cat "$1"; } | sha1sum | cut -d ' ' -f 1; }
sha() { sha256sum < "$1" | cut -d ' ' -f 1; }
try() { d=$1; shift; qx verify "$d" --hub "$@" > out 2> err; echo "$d: $?$(sed -n "s/^error: checksum: '\([^']*\)'.*/ \1/p" out)"; }
mkdir -p hub/blobs hub/snapshots/one plain/.cache/huggingface/download
for f in "$SAMPLE"/*; do
    name=${f##*/}
    case $name in
    *.safetensors) etag=$(sha "$f") ;;
    *) etag=$(git_id "$f") ;;
    esac
    cp "$f" "hub/blobs/$etag"
    ln -s "../../blobs/$etag" "hub/snapshots/one/$name"
    cp "$f" plain
    printf '%s\n%s\n1700000000.5\n' 0123456789abcdef0123456789abcdef01234567 "$etag" \
        > "plain/.cache/huggingface/download/$name.metadata"
done
chmod -R u+w hub plain
try hub/snapshots/one
cat out
try plain -q
# A bit of a weight, which may be any other number, and a blank in a small file that changes no meaning.
printf '\052' | dd of=plain/model-00001-of-00005.safetensors bs=1 seek=1000000 conv=notrunc 2> /dev/null
printf '\n' >> hub/snapshots/one/generation_config.json
try plain
try hub/snapshots/one
# A file of one's own is not the hub's; without any checksum there is nothing to compare.
cp "$SAMPLE"/model-00001-of-00005.safetensors plain
echo mine > plain/notes.txt
try plain
grep -o '^note: checksum-missing' out
rm -r plain/.cache
try plain
grep -o hub-checksums err
qx verify plain --hub --manifest x 2>&1
echo $?
