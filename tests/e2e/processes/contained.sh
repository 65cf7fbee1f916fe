# Runs a command as in a container: contained.sh WRITABLE PYTHON UID COMMAND...
# Nothing can be written but WRITABLE; the user is a number without a name, a home or a capability.
# PYTHON is the interpreter's folder, which the user may else not reach. Called under `unshare -m`.
set -eu
writable=$1 python=$2 uid=$3
shift 3
mount -t tmpfs -o mode=1777 tmpfs "$writable"
case $python in
/root/*)
    mkdir "$writable/python"
    mount --bind "$python" "$writable/python"
    mount -t tmpfs -o mode=755 tmpfs /root
    mkdir -p "$python"
    mount --bind "$writable/python" "$python"
    ;;
esac
mount -o remount,bind,ro /
cd /
exec setpriv --reuid "$uid" --regid "$uid" --clear-groups --no-new-privs --bounding-set=-all \
    env -i TMPDIR="$writable" "$@"
