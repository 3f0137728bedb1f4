# A list of checksums: written, compared, kept through another split of the files.
command -v qx-repack > /dev/null || { echo "qx-repack is not built" >&2; exit 77; }
cp -r "$SAMPLE" c
chmod -R u+w c
try() { qx verify c "$@" > out 2> err; echo "$*: $?"; }
try --write-manifest sums --sha256
head -1 sums
try --write-manifest sums
grep -o "exists" err
try --manifest sums
qx verify c --write-manifest - -q > again
grep -v sha256 sums | cmp - again
# One byte of a tensor: file and tensor are named.
printf '\377' | dd of=c/model-00001-of-00005.safetensors bs=1 seek=1000000 conv=notrunc 2> /dev/null
try --manifest sums
grep -c '^error: checksum' out
cp "$SAMPLE"/model-00001-of-00005.safetensors c
# The same tensors in other files.
qx repack c -o d --max-shard 2MiB -q > /dev/null
qx verify d --manifest sums | grep -o '^note: manifest-layout\|^ok'
# Lists of other tools.
(cd c && sha256sum -- *.json | awk '{print toupper($1) " *" $2}') > sums2
try --manifest sums2
echo nonsense > sums3
try --manifest sums3
grep -o manifest-syntax err
# A reader that has gone is no failure, a full disk is.
{ sleep 0.2; qx verify c --write-manifest - -q; echo "$?" > code; } | true
cat code
if [ -e /dev/full ]; then qx verify c --write-manifest - -q > /dev/full 2> err; fi
echo "$? $(grep -c 'No space' err)"
