#!/bin/sh
# hvd-entrypoint worker                   wait for the launcher: sshd on port 2222
# hvd-entrypoint launcher demo [OPTION..] train the demo on all workers and print its table
# hvd-entrypoint launcher COMMAND..       horovodrun COMMAND on all workers, one rank each
# hvd-entrypoint COMMAND..                run COMMAND
#
# Workers are those of HVD_HOSTS (horovodrun's form, a:1,b:1), or every address of the name HVD_WORKERS.
# The users' keys are made by whoever starts first, in /keys, which all containers share; where a scheduler
# mounts keys into ~/.ssh, those are used.
set -eu

make_keys() {
    umask 077
    mkdir -p "$HOME/.sshd"
    [ -f "$HOME/.sshd/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$HOME/.sshd/host_key"
    [ -s "$HOME/.ssh/authorized_keys" ] && return
    if [ ! -w /keys ]; then
        echo "hvd-entrypoint: the user $(id -un) cannot write to /keys, which is to hold the ssh keys of the containers: mount a volume that it may write to" >&2
        exit 1
    fi
    mkdir -p "$HOME/.ssh"
    (
        flock 9
        [ -f /keys/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -C hvd-adaptive -f /keys/id_ed25519
    ) 9>/keys/.lock
    cp /keys/id_ed25519 /keys/id_ed25519.pub "$HOME/.ssh/"
    cp /keys/id_ed25519.pub "$HOME/.ssh/authorized_keys"
    umask 022
}

find_hosts() {
    if [ -n "${HVD_HOSTS:-}" ]; then
        echo "$HVD_HOSTS"
        return
    fi
    getent ahostsv4 "${HVD_WORKERS:-worker}" | awk '{print $1}' | sort -u | sed 's/$/:1/' | paste -sd, -
}

echo "${1:-worker}" > "$HOME/.role" || :  # for the health check; a command may run without a home
case "${1:-worker}" in
worker)
    make_keys
    exec /usr/sbin/sshd -D -e -f /etc/hvd/sshd_config
    ;;
launcher)
    shift
    make_keys
    hosts=$(find_hosts)
    if [ -z "$hosts" ]; then
        echo "hvd-entrypoint: no worker answers to the name ${HVD_WORKERS:-worker}: start workers on the same network, or set HVD_HOSTS=host:1,host:1" >&2
        exit 1
    fi
    ranks=$(echo "$hosts" | tr , '\n' | sed 's/.*://' | awk '{n += $1} END {print n}')
    echo "$ranks ranks on $hosts"
    if [ "${1:-demo}" = demo ]; then
        [ $# -eq 0 ] || shift
        exec python /opt/hvd/examples/demo.py --hosts "$hosts" --np "$ranks" "$@"
    fi
    exec horovodrun --gloo -H "$hosts" -np "$ranks" "$@"
    ;;
*)
    exec "$@"
    ;;
esac
