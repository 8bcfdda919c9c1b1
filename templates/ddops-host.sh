#!/bin/sh
# ddops-host: the one state machine ddops keeps on a host. Root-owned, installed by `ddops install`.
#
# The controller, Ctrl-C and the guard all act through it, so that whoever comes second finds out and stops.
# A trial lives only under /run: a reboot undoes it. /etc always holds the last verified unit.
# Every verb may be repeated by the same run: it looks at the state first and does only what is missing.
#
#   ddops-host observe UNIT PORT RELEASES       everything ddops looks at, as "key value" lines
#   ddops-host lease take|beat|drop|break UNIT [RUN [TTL]]   take reads holder and command from stdin
#   ddops-host check-unit UNIT                   systemd-analyze verify of the unit on stdin, warnings are errors
#   ddops-host arm|extend UNIT RUN SECONDS [CAP] the guard: undoes the trial when its deadline passes
#   ddops-host stage UNIT RUN DIGEST             stdin: unit, fence, ledger line, each base64 on a line
#   ddops-host revoke UNIT RUN DIGEST            /etc goes to a stored unit; stdin: ledger line
#   ddops-host switch UNIT RUN PORT FLOOR WAIT   stop, wait for cgroup, port, GPU memory (MiB), start
#   ddops-host confirm UNIT RUN INVOCATION DIGEST  stdin: two ledger lines (proven, confirmed), base64
#   ddops-host undo UNIT RUN BY PORT FLOOR WAIT  stdin: why
#   ddops-host trial UNIT                        where the trial stands
#   ddops-host guard UNIT RUN                    one tick of the guard: undoes what is overdue, finishes what was cut off
#   ddops-host record UNIT RUN                   stdin: a ledger line
#   ddops-host evidence UNIT RUN                 stdin: the full evidence of a verdict, kept beside the ledger
#   ddops-host stored UNIT DIGEST                a unit kept by its sha256
#   ddops-host keep UNIT RUN                     keep what is in /etc now by its sha256
#   ddops-host golden UNIT | keep-golden UNIT RUN  answers recorded with speculation off: print, keep from stdin
#   ddops-host logs UNIT INVOCATION LINES        the journal of one start only
#   ddops-host release DIR VERSION MANIFEST_SHA256 [PREFIX...]  stdin: tar with SHA256SUMS, checked before it counts
set -eu
umask 022
export LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

INSTALLED=/usr/local/lib/ddops/ddops-host
CONTROL=/run/systemd/system.control
KEPT_LINES=2000
# Kept free for the way back, so that a full disk can't stand in it. systemd reloads only with 16 MiB free in /run.
RUN_ROOM=18874368   # bytes
DISK_ROOM=65536
SWITCH_STOP=150     # seconds an engine with users may take to stop; then it is killed
UNDO_STOP=60        # the same for one that is fenced, or no longer wanted
START_SEEN=30       # seconds in which systemd must begin a start

# Exit statuses the controller tells apart: 64 usage, 65 unit not valid, 66 nothing to act on, 69 no room,
# 73 held by another run, 74 another release has that name, 75 too late (the other side has the token),
# 78 a unit that ddops must not replace.
fail() { code=$1; shift; echo "$*" >&2; exit "$code"; }
now() { read -r up _ < /proc/uptime; echo "${up%.*}"; }
put() { cat > "$1.new"; sync "$1.new" 2>/dev/null || sync; mv -f "$1.new" "$1"; }
get() { if [ -r "$1" ]; then cat "$1"; else echo "${2:-}"; fi; }
digest_of() { if [ -f "$1" ]; then sha256sum < "$1" | cut -d' ' -f1; fi; }
show() { systemctl show "$UNIT" -p "$1" --value; }
b64() { base64 -w0 < "$1"; }

names() { # sets every path of UNIT; refuses a name that could leave its folder
    UNIT=$1
    case $UNIT in
        *[!A-Za-z0-9_.@:-]* | -* | .* | '') fail 64 "not a unit name: $UNIT" ;;
        *.service) ;;
        *) fail 64 "not a service unit: $UNIT" ;;
    esac
    KEEP=/var/lib/ddops/$UNIT
    LIVE=/run/ddops/$UNIT
    ETC=/etc/systemd/system/$UNIT
    TRIAL=$CONTROL/$UNIT
    FENCE=$CONTROL/$UNIT.d/90-ddops-fence.conf
    # One name for each unit: foo@1 and foo_1 must not share a guard.
    SAFE=$(printf %s "${UNIT%.service}" | sed 's/_/__/g; s/@/_a/g; s/:/_c/g')
    GUARD=ddops-guard-$SAFE
    SELF=$LIVE/ddops-host # a copy made when a trial is armed: whatever becomes of the installed one, it ends
    case $verb in
        observe | trial | logs | check-unit | stored | golden) ;; # looking changes nothing
        *)
            for d in /var/lib/ddops "$KEEP" "$KEEP/units" "$KEEP/evidence" /run/ddops "$LIVE"; do
                if [ ! -d "$d" ]; then mkdir -p "$d"; chmod 755 "$d"; fi # and nothing else: the disk may be read-only by now
            done
            ;;
    esac
}

locked() { # one short critical section at a time; ends with the process or unlocked
    exec 8> "$LIVE/lock"
    flock -w 20 8 || fail 73 "another ddops-host call has held $LIVE/lock for 20 s"
}
unlocked() { exec 8>&-; }

# ---------------------------------------------------------------- ledger
append() { # one line, on disk before we go on; a line torn by a power cut is closed first
    ledger=$KEEP/ledger.ndjson
    if [ -s "$ledger" ] && [ -n "$(tail -c1 "$ledger")" ]; then echo >> "$ledger" || return 1; fi
    printf '%s\n' "$1" >> "$ledger" || return 1
    sync "$ledger" 2>/dev/null || sync
}
append_once() { # KIND RUN LINE: half-finished work is completed forward without writing twice; a torn line doesn't count
    if [ -f "$KEEP/ledger.ndjson" ] && grep -F "\"run\":\"$2\"" "$KEEP/ledger.ndjson" | grep -F "\"kind\":\"$1\"" | grep -q '}$'; then
        return 0
    fi
    append "$3"
}
append_anyway() { # the same, out of the room kept for it when the disk is full; no disk stops what comes after it
    append_once "$@" && return 0
    rm -f "$KEEP/room" || true
    append_once "$@" || echo "the ledger could not be written: $1 of run $2" >&2
}
utc() { date -u +%Y-%m-%dT%H:%M:%SZ; }

# ---------------------------------------------------------------- lease
lease_left() { echo $(($(get "$LIVE/lease/expires" 0) - $(now))); }
holds() { # RUN holds the lease
    [ "$(get "$LIVE/lease/run")" = "$1" ] || fail 73 "the lease is held by: $(get "$LIVE/lease/holder" nobody)"
}
lease() {
    verb=$1; names "$2"; run=${3:-}; ttl=${4:-120}
    locked
    case $verb in
        take)
            held=$(get "$LIVE/lease/run")
            if [ -n "$held" ] && [ "$held" != "$run" ]; then
                if [ "$(lease_left)" -gt 0 ]; then fail 73 "$(get "$LIVE/lease/holder")"; fi
                if [ -d "$LIVE/trial" ]; then fail 73 "the trial of run $(get "$LIVE/trial/run") is still open"; fi
            fi
            if [ "$held" != "$run" ]; then rm -rf "$LIVE/lease"; mkdir "$LIVE/lease"; fi
            head -c 4096 | put "$LIVE/lease/holder"
            echo $(($(now) + ttl)) | put "$LIVE/lease/expires"
            echo "$run" | put "$LIVE/lease/run"
            ;;
        beat) holds "$run"; echo $(($(now) + ttl)) | put "$LIVE/lease/expires" ;;
        drop) if [ "$(get "$LIVE/lease/run")" = "$run" ]; then rm -rf "$LIVE/lease"; fi ;;
        break)
            if [ -d "$LIVE/trial" ]; then fail 75 "the trial of run $(get "$LIVE/trial/run") is still open"; fi
            rm -rf "$LIVE/lease"
            ;;
        *) fail 64 "lease: no verb $verb" ;;
    esac
}

# ---------------------------------------------------------------- what is there
port_owner() { # a listener on PORT outside the unit's cgroup: its pid, 0 when it can't be told; nothing when free
    hex=$(printf ':%04X' "$1")
    inode=$(awk -v p="$hex" '$4 == "0A" && substr($2, length($2) - 4) == p { print $10; exit }' /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    if [ -z "$inode" ]; then return 0; fi
    # find ends non-zero when a process goes away under it
    pid=$(find /proc/[0-9]*/fd -lname "socket:\[$inode\]" 2>/dev/null | head -n 1 | cut -d/ -f3 || true)
    if [ -z "$pid" ]; then echo 0; return 0; fi
    group=$(show ControlGroup)
    if [ -n "$group" ] && grep -qF ":$group" "/proc/$pid/cgroup" 2>/dev/null; then return 0; fi
    echo "$pid"
}
gpus() {
    if command -v nvidia-smi > /dev/null 2>&1; then
        timeout 20 nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.free,memory.total \
            --format=csv,noheader,nounits 2>/dev/null || true
    fi
}
gpu_free() { gpus | awk -F', *' 'NR == 1 || $4 < low { low = $4 } END { if (NR) print int(low) }'; }
file_line() { if [ -f "$2" ]; then echo "$1 $(b64 "$2")"; fi; }

observe() {
    names "$1"; port=$2; releases=$3
    echo "boot $(cat /proc/sys/kernel/random/boot_id)"
    echo "uptime $(cut -d' ' -f1 /proc/uptime)"
    echo "systemd $(systemctl --version | awk 'NR == 1 { print $2 }')"
    systemctl show "$UNIT" -p LoadState,ActiveState,SubState,Result,MainPID,NRestarts,InvocationID,NeedDaemonReload,FragmentPath,DropInPaths,StatusText,ExecMainStatus,ExecMainCode,ControlGroup,ActiveEnterTimestampMonotonic,Type,UnitFileState,Environment,EnvironmentFiles,UnsetEnvironment | sed 's/^/show./; s/=/ /'
    file_line etc "$ETC"
    file_line trial_unit "$TRIAL"
    fragment=$(show FragmentPath)
    if [ -n "$fragment" ]; then file_line fragment "$fragment"; fi
    pid=$(show MainPID)
    if [ "$pid" -gt 0 ] && [ -r "/proc/$pid/cmdline" ]; then echo "argv $(b64 "/proc/$pid/cmdline")"; fi
    if [ "$pid" -gt 0 ] && [ -r "/proc/$pid/environ" ]; then # of it only what the unit sets, and whose start it is
        set_here=$(show Environment | grep -oE '[A-Za-z_][A-Za-z0-9_]*=' | tr -d '\n' | tr = '|' || true)
        echo "environ $(grep -zaE "^(${set_here}INVOCATION_ID)=" "/proc/$pid/environ" | base64 -w0)"
    fi
    if [ -f "$KEEP/ledger.ndjson" ]; then echo "ledger $(tail -n $KEPT_LINES "$KEEP/ledger.ndjson" | base64 -w0)"; fi
    if [ -d "$LIVE/lease" ]; then
        echo "lease.run $(get "$LIVE/lease/run")"; echo "lease.left $(lease_left)"; file_line lease.holder "$LIVE/lease/holder"
    fi
    trial_lines
    gpus | sed 's/^/gpu /'
    for place in "$releases" /opt /var/lib /; do
        if [ -d "$place" ]; then
            echo "disk $(df -Pm "$place" | awk 'NR == 2 { print $4 }') $place"
        fi
    done
    echo "port_owner $(port_owner "$port")"
    if [ -d "$releases" ]; then
        for r in "$releases"/*/SHA256SUMS; do
            if [ -f "$r" ]; then echo "release $(digest_of "$r") $(basename "$(dirname "$r")")"; fi
        done
    fi
    echo "script $(digest_of "$INSTALLED")"
    echo "address $(ip -o addr show 2>/dev/null | awk '{ sub("/.*", "", $4); printf "%s ", $4 }')"
    if journalctl -b -q _PID=1 "UNIT=$UNIT" -n 400 -o cat 2>/dev/null | grep -q 'not support BPF'; then echo "no_fence 1"; fi
}

# ---------------------------------------------------------------- trial and guard
trial_lines() { # of one trial: it may be settled, or another armed, while it is read
    for again in 1 2 3 4 5; do
        where=$LIVE/trial open=1
        if [ ! -d "$where" ]; then where=$LIVE/last open=0; fi
        node=$(stat -c %i "$where" 2>/dev/null || true)
        if [ -z "$node" ]; then continue; fi
        lines=$(for f in run digest previous token step invocation outcome by port floor wait; do
            echo "trial.$f $(get "$where/$f" 2>/dev/null)"
        done
        echo "trial.left $(($(get "$where/deadline" 0 2>/dev/null) - $(now)))" 2>/dev/null || true)
        if [ "$(stat -c %i "$where" 2>/dev/null || true)" = "$node" ]; then
            printf '%s\ntrial.open %s\n' "$lines" "$open"
            return 0
        fi
    done
}
open_trial() { # RUN's own, still undecided
    if [ ! -d "$LIVE/trial" ]; then
        if [ "$(get "$LIVE/last/run")" = "$1" ]; then fail 75 "too late: $(get "$LIVE/last/outcome")"; fi
        fail 66 "no trial is open on $UNIT"
    fi
    [ "$(get "$LIVE/trial/run")" = "$1" ] || fail 73 "the open trial is that of run $(get "$LIVE/trial/run")"
    token=$(get "$LIVE/trial/token")
    [ -z "$token" ] || fail 75 "too late: the trial is being settled ($token)"
}
deadline() { # SECONDS: never beyond the cap
    to=$(($(now) + $1)); cap=$(get "$LIVE/trial/cap")
    if [ "$to" -gt "$cap" ]; then to=$cap; fi
    echo "$to" | put "$LIVE/trial/deadline"
}
ours() { # what is in /etc may be replaced by a file
    if [ -L "$ETC" ]; then fail 78 "$ETC is a symbolic link to $(readlink "$ETC"): ddops replaces a unit, never a link or a mask"; fi
    if [ "$(show LoadState)" = masked ]; then fail 78 "$UNIT is masked: somebody wants it off (systemctl unmask $UNIT)"; fi
}
watch() { # RUN: a service that ticks, not a timer: each daemon-reload of anybody would set a timer back
    systemctl stop "$GUARD.service" 2>/dev/null || true
    systemctl reset-failed "$GUARD.service" 2>/dev/null || true
    systemd-run --quiet --collect --unit="$GUARD" --property=StartLimitIntervalSec=0 --property=OOMScoreAdjust=-1000 \
        --property=Restart=always --property=RestartSec=1 --property=RestartPreventExitStatus=0 \
        /bin/sh "$SELF" _guard "$UNIT" "$1" 8>&-
}
_guard() {
    names "$1"
    locked; unlocked # the trial that is being armed is there now, or arming has failed
    while [ "$(get "$LIVE/trial/run")" = "$2" ]; do
        sh "$SELF" guard "$UNIT" "$2" || true # a tick that fails is made up for by the next one
        sleep 1
    done
}
arm() {
    names "$1"; run=$2; seconds=$3; cap=$4
    locked; holds "$run"
    if [ -d "$LIVE/trial" ]; then open_trial "$run"; return 0; fi
    ours
    rm -rf "$LIVE/trial.new" "$LIVE/last"; mkdir "$LIVE/trial.new"
    put "$SELF" < "$0"
    head -c $RUN_ROOM /dev/zero > "$LIVE/trial.new/room"
    head -c $DISK_ROOM /dev/zero | put "$KEEP/room"
    echo "$run" > "$LIVE/trial.new/run"
    digest_of "$ETC" > "$LIVE/trial.new/previous"
    echo armed > "$LIVE/trial.new/step"
    echo $(($(now) + cap)) > "$LIVE/trial.new/cap"
    echo $(($(now) + seconds)) > "$LIVE/trial.new/deadline"
    watch "$run"
    mv -T "$LIVE/trial.new" "$LIVE/trial"
}
extend() {
    names "$1"; run=$2
    locked; open_trial "$run"; deadline "$3"
    if ! systemctl is-active --quiet "$GUARD.service"; then watch "$run"; fi # somebody stopped it
    if [ "$(get "$LIVE/lease/run")" = "$run" ]; then echo $(($(now) + $3)) | put "$LIVE/lease/expires"; fi
}
worker() { # NAME VERB ARGS...: a host unit, so that a lost connection changes nothing
    unit=$1; shift
    if systemctl is-active --quiet "$unit.service"; then return 0; fi
    systemctl reset-failed "$unit.service" 2>/dev/null || true
    systemd-run --quiet --collect --no-block --unit="$unit" /bin/sh "$SELF" "$@" 8>&-
}
decide() { # TOKEN BY WHY: from here on nobody else settles this trial
    rm -f "$LIVE/trial/room" # a full /run must not stand in the way
    printf '%s\n' "$3" | put "$LIVE/trial/why"
    printf '%s\n' "$2" | put "$LIVE/trial/by"
    echo "$1" | put "$LIVE/trial/token"
}
guard() { # one tick
    names "$1"; run=$2
    locked
    [ "$(get "$LIVE/trial/run")" = "$run" ] || return 0
    if [ -z "$(get "$LIVE/trial/token")" ] && [ "$(now)" -ge "$(get "$LIVE/trial/deadline" 0)" ]; then
        decide undo guard "the guard's deadline passed with nothing confirmed"
    fi
    case $(get "$LIVE/trial/token") in # half-finished work is completed forward
        '') if [ "$(get "$LIVE/trial/step")" = stopping ]; then worker "ddops-switch-$SAFE" _switch "$UNIT" "$run" || true; fi ;;
        # Where systemd takes no new unit (a full /run), the tick does it itself.
        *) worker "ddops-settle-$SAFE" "_$(get "$LIVE/trial/token")" "$UNIT" "$run" || { unlocked; "_$(get "$LIVE/trial/token")" "$UNIT" "$run"; } ;;
    esac
}

# ---------------------------------------------------------------- stage, revoke, switch
check_unit() {
    names "$1"
    dir=$(mktemp -d)
    trap 'rm -rf "$dir"' EXIT
    cat > "$dir/$UNIT"
    said=$(systemd-analyze verify --recursive-errors=no "$dir/$UNIT" 2>&1) || fail 65 "$said"
    if printf '%s\n' "$said" | grep -F "$UNIT" >&2; then exit 65; fi
}
store() { # DIGEST FILE: units are kept by sha256
    [ "$(digest_of "$2")" = "$1" ] || fail 65 "the unit arrived damaged: $(digest_of "$2") instead of $1"
    put "$KEEP/units/$1" < "$2"
}
stage() {
    names "$1"; run=$2; digest=$3
    locked; holds "$run"; open_trial "$run"
    if [ "$(get "$LIVE/trial/digest")" = "$digest" ] && [ "$(get "$LIVE/trial/step")" != armed ]; then return 0; fi
    read -r unit_64; read -r fence_64; read -r line_64
    printf %s "$unit_64" | base64 -d > "$LIVE/trial/unit"
    store "$digest" "$LIVE/trial/unit"
    append_once attempt "$run" "$(printf %s "$line_64" | base64 -d)"
    echo "$digest" | put "$LIVE/trial/digest"
    mkdir -p "$CONTROL" "$(dirname "$FENCE")"
    if [ -n "$fence_64" ] && [ "$fence_64" != - ]; then printf %s "$fence_64" | base64 -d | put "$FENCE"; fi
    put "$TRIAL" < "$LIVE/trial/unit"
    systemctl daemon-reload
    [ "$(show FragmentPath)" = "$TRIAL" ] || fail 65 "systemd loads $UNIT from $(show FragmentPath), not from the trial"
    echo staged | put "$LIVE/trial/step"
}
to_etc() { # DIGEST: a stored unit: write, fsync, rename, fsync the folder
    new=/etc/systemd/system/.$UNIT.ddops
    cp "$KEEP/units/$1" "$new" && chmod 644 "$new" && { sync "$new" 2>/dev/null || sync; } \
        && [ "$(digest_of "$new")" = "$1" ] && mv -f "$new" "$ETC" || { rm -f "$new"; return 1; }
    sync /etc/systemd/system 2>/dev/null || sync
}
revoke() {
    names "$1"; run=$2; digest=$3
    locked; holds "$run"; open_trial "$run"
    [ "$(digest_of "$KEEP/units/$digest")" = "$digest" ] || fail 65 "no sound copy of unit $digest is stored"
    append_once revoked "$run" "$(cat)"
    echo "$digest" | put "$LIVE/trial/revoked" # from here on an undo goes to it, and must restart: what runs is revoked
    to_etc "$digest" || fail 69 "/etc could not be written"
    echo "$digest" | put "$LIVE/trial/previous"
}
group_busy() { # GROUP
    if [ -z "$1" ]; then return 1; fi
    for tree in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        if [ -d "$tree$1" ] && [ -n "$(find "$tree$1" -name cgroup.procs -exec cat {} + 2>/dev/null)" ]; then return 0; fi
    done
    return 1
}
group_kill() { # GROUP: what a stop has left alive (KillMode=process, a child that ignores SIGTERM) belongs to the engine
    for tree in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
        if [ -d "$tree$1" ]; then find "$tree$1" -name cgroup.procs -exec cat {} + 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true; fi
    done
}
emptied() { # GROUP PORT FLOOR WAIT: 0 when the engine has really gone; else says what is left
    begun=$(now)
    while :; do
        left=
        if group_busy "$1"; then
            left="processes are left in $1"
            if [ $(($(now) - begun)) -ge 5 ]; then group_kill "$1"; fi
        fi
        owner=$(port_owner "$2")
        if [ -n "$owner" ]; then left="port $2 is held by pid $owner ($(tr '\0' ' ' < "/proc/$owner/cmdline" 2>/dev/null | cut -c1-80))"; fi
        if [ "$3" -gt 0 ]; then
            free=$(gpu_free)
            if [ -n "$free" ] && [ "$free" -lt "$3" ]; then left="GPU memory free is $free MiB, below $3"; fi
        fi
        if [ -z "$left" ]; then return 0; fi
        if [ $(($(now) - begun)) -ge "$4" ]; then echo "$left"; return 1; fi
        sleep 0.2
    done
}
restart_clean() { # STOP: the same order for a switch and for an undo; prints the fault, if any
    group=$(show ControlGroup)
    if [ -z "$group" ]; then group=$(get "$LIVE/trial/group"); fi # a stop that was cut off has taken it from systemd
    echo "$group" | put "$LIVE/trial/group" 2>/dev/null || true
    if ! timeout "$1" systemctl stop "$UNIT"; then
        systemctl kill --signal=KILL "$UNIT" 2>/dev/null || true
        timeout 30 systemctl stop "$UNIT" || true
    fi
    systemctl reset-failed "$UNIT" 2>/dev/null || true
    if ! emptied "$group" "$(get "$LIVE/trial/port" 0)" "$(get "$LIVE/trial/floor" 0)" "$(get "$LIVE/trial/wait" 60)"; then return 1; fi
    before=$(show InvocationID)
    if ! said=$(systemctl start --no-block "$UNIT" 2>&1); then echo "systemd did not start it: $said"; return 1; fi
    # systemd names the last start until the new one has begun, and that may have to wait for other units.
    begun=$(now)
    while [ -z "$(show InvocationID)" ] || [ "$(show InvocationID)" = "$before" ]; do
        if [ $(($(now) - begun)) -ge $START_SEEN ]; then echo "systemd did not begin the start in $START_SEEN s"; return 1; fi
        sleep 0.1
    done
}
switch() {
    names "$1"; run=$2
    locked; holds "$run"; open_trial "$run"
    case $(get "$LIVE/trial/step") in
        staged) ;;
        armed) fail 66 "nothing is staged" ;;
        *) return 0 ;; # under way or done: never twice
    esac
    room "$3" "$4" "$5"
    echo stopping | put "$LIVE/trial/step"
    worker "ddops-switch-$SAFE" _switch "$UNIT" "$run"
}
room() { echo "$1" | put "$LIVE/trial/port"; echo "$2" | put "$LIVE/trial/floor"; echo "$3" | put "$LIVE/trial/wait"; }
_switch() {
    names "$1"
    [ "$(get "$LIVE/trial/run")$(get "$LIVE/trial/step")" = "$2stopping" ] || return 0
    if fault=$(restart_clean $SWITCH_STOP); then
        show InvocationID | put "$LIVE/trial/invocation"
        echo started | put "$LIVE/trial/step"
    else
        printf 'fault %s\n' "$fault" | head -n 1 | put "$LIVE/trial/step"
    fi
}

# ---------------------------------------------------------------- confirm and undo: one token (written under
# the lock, never taken back by the other side), exactly one wins
confirm() {
    names "$1"; run=$2
    locked
    if [ "$(get "$LIVE/trial/run")" = "$run" ] && [ "$(get "$LIVE/trial/token")" = confirm ]; then return 0; fi
    holds "$run"; open_trial "$run"
    read -r proven_64; read -r confirmed_64
    printf %s "$proven_64" | base64 -d | put "$LIVE/trial/proven"
    printf %s "$confirmed_64" | base64 -d | put "$LIVE/trial/confirmed"
    echo "$3" | put "$LIVE/trial/invocation"
    echo "$4" | put "$LIVE/trial/proven_digest"
    decide confirm controller confirm
    worker "ddops-settle-$SAFE" _confirm "$UNIT" "$run"
}
same_as_proven() { # prints what differs
    want=$(get "$LIVE/trial/proven_digest")
    if [ "$(get "$LIVE/trial/step")" != started ]; then echo "the trial was never switched to"; fi
    if [ "$(show InvocationID)" != "$(get "$LIVE/trial/invocation")" ]; then echo "the engine was started anew since it was proven"; fi
    if [ "$(show ActiveState)" != active ]; then echo "the engine is $(show ActiveState)"; fi
    if [ "$(digest_of "$TRIAL")" != "$want" ]; then echo "the trial unit is not the proven one"; fi
    if [ "$(show NeedDaemonReload)" != no ]; then echo "the loaded unit is not the one on disk"; fi
    if [ "$(digest_of "$ETC")" != "$(get "$LIVE/trial/previous")" ]; then echo "somebody has changed $ETC since the trial began"; fi
}
settling() { # RUN: one worker at a time, and only while there is something to settle
    exec 7> "$LIVE/settling"
    flock -n 7 && [ "$(get "$LIVE/trial/run")" = "$1" ]
}
settle() { # OUTCOME: the last act of either side
    echo "$1" | put "$LIVE/trial/outcome"
    rm -rf "$LIVE/last"; mv -T "$LIVE/trial" "$LIVE/last"
    systemctl stop --no-block "$GUARD.service" 2>/dev/null || true
}
drop_trial() { # the trial and its fence; what runs keeps running
    rm -f "$TRIAL" "$FENCE"
    systemctl daemon-reload
    # systemd 257 forgets the filter but leaves it attached to a running unit (252 and 255 do not); setting the
    # property makes it let go. A unit that has rules of its own, wherever they stand, keeps them.
    if [ -z "$(show IPAddressDeny)$(show IPAddressAllow)" ]; then
        systemctl set-property --runtime "$UNIT" IPAddressDeny= 2>/dev/null || true
        rm -f "$CONTROL/$UNIT.d/50-IPAddressDeny.conf"
        systemctl daemon-reload
    fi
    rmdir "$CONTROL/$UNIT.d" 2>/dev/null || true
}
promoted() { # the rename is the promotion; one that was cut off right after it has happened
    [ "$(get "$LIVE/trial/previous")" != "$(get "$LIVE/trial/proven_digest")" ] \
        && [ "$(digest_of "$ETC")" = "$(get "$LIVE/trial/proven_digest")" ]
}
promote() { append_once proven "$run" "$(cat "$LIVE/trial/proven")" && to_etc "$(get "$LIVE/trial/proven_digest")"; }
_confirm() {
    names "$1"; run=$2
    settling "$run" || return 0
    if [ ! -f "$LIVE/trial/promoted" ] && ! promoted; then
        differs=$(same_as_proven)
        if [ -z "$differs" ] && ! promote; then differs="it could not be written to disk"; fi
        if [ -n "$differs" ]; then
            decide undo confirm "confirm refused: $differs"
            take_back
            return 0
        fi
    fi
    : | put "$LIVE/trial/promoted"
    drop_trial
    if [ -z "$(get "$LIVE/trial/previous")" ]; then systemctl enable --quiet "$UNIT" || true; fi
    outcome=confirmed
    if [ "$(show InvocationID)" != "$(get "$LIVE/trial/invocation")" ] || [ "$(show ActiveState)" != active ]; then
        # It died between proof and promotion, and a promoted Restart= never revives the dead.
        outcome=confirmed-restarted
        systemctl start --no-block "$UNIT" || true
    fi
    append_anyway confirmed "$run" "$(cat "$LIVE/trial/confirmed")"
    settle "$outcome"
}
undo() {
    names "$1"; run=$2; by=$3
    locked
    if [ "$(get "$LIVE/trial/run")" = "$run" ] && [ "$(get "$LIVE/trial/token")" = undo ]; then return 0; fi
    open_trial "$run"
    rm -f "$LIVE/trial/room"
    room "$4" "$5" "$6"
    decide undo "$by" "$(head -c 4000)"
    worker "ddops-settle-$SAFE" _undo "$UNIT" "$run" || true # the guard's next tick tries again
}
_undo() {
    names "$1"; run=$2
    settling "$run" || return 0
    take_back
}
touched() { # Staged but never switched: what runs is still what ran before, untouched and as proven as it was.
    [ -f "$LIVE/trial/revoked" ] && return 0
    case $(get "$LIVE/trial/step") in armed | staged) return 1 ;; esac
}
restore() { # what is in /etc runs again; a fault is kept for whoever asks
    if [ ! -f "$ETC" ]; then
        timeout $UNDO_STOP systemctl stop "$UNIT" 2>/dev/null || systemctl kill --signal=KILL "$UNIT" 2>/dev/null || true
        systemctl reset-failed "$UNIT" 2>/dev/null || true
    elif touched && ! fault=$(restart_clean $UNDO_STOP); then
        printf '%s\n' "$fault" | put "$LIVE/trial/fault" || true
        systemctl start --no-block "$UNIT" || true
    fi
}
take_back() {
    systemctl stop "ddops-switch-$SAFE.service" 2>/dev/null || true
    to=$(get "$LIVE/trial/revoked")
    if [ -n "$to" ] && [ "$(digest_of "$ETC")" != "$to" ]; then to_etc "$to" || true; fi
    drop_trial
    if [ ! -f "$LIVE/trial/restored" ]; then
        restore
        : | put "$LIVE/trial/restored" # whatever fails from here on must not restart it again
    fi
    append_anyway undone "$run" "$(undone_line)"
    settle undone
}
plain() { get "$LIVE/trial/$1" | tr -d '\000-\037"\\'; }
undone_line() {
    printf '{"v":1,"kind":"undone","run":"%s","time":"%s","digest":"%s","boot":"%s","by":"%s","why":"%s","extra":{"restored":"%s"}}' \
        "$run" "$(utc)" "$(get "$LIVE/trial/digest")" "$(cat /proc/sys/kernel/random/boot_id)" "$(plain by)" "$(plain why)" "$(digest_of "$ETC")"
}

# ---------------------------------------------------------------- the rest
record() { names "$1"; locked; holds "$2"; append "$(cat)"; }
evidence() {
    names "$1"
    case $2 in *[!a-z0-9.-]* | '') fail 64 "not a run id: $2" ;; esac
    put "$KEEP/evidence/$2.json"
    # Old evidence goes first: the ledger keeps every verdict, the folder the newest 50 in full.
    find "$KEEP/evidence" -name '*.json' -printf '%T@ %p\n' | sort -rn | awk 'NR > 50 { print $2 }' | xargs -r rm -f
}
stored() {
    names "$1"
    case $2 in *[!0-9a-f]* | '') fail 64 "not a digest: $2" ;; esac
    [ "$(digest_of "$KEEP/units/$2")" = "$2" ] || fail 66 "no sound copy of unit $2 is kept"
    cat "$KEEP/units/$2"
}
keep() {
    names "$1"; locked; holds "$2"
    [ -f "$ETC" ] || fail 66 "$ETC does not exist"
    put "$KEEP/units/$(digest_of "$ETC")" < "$ETC"
}
golden() { names "$1"; if [ -f "$KEEP/golden.json" ]; then cat "$KEEP/golden.json"; fi; }
keep_golden() { names "$1"; locked; holds "$2"; put "$KEEP/golden.json"; }
logs() {
    names "$1"
    case $2 in *[!0-9a-f]* | '') fail 64 "not an invocation id: $2" ;; esac
    timeout 5 journalctl --sync > /dev/null 2>&1 || true # what a process said last may still be on its way
    journalctl -q -o cat --no-pager -n "$3" "_SYSTEMD_INVOCATION_ID=$2" + "INVOCATION_ID=$2"
}
release() {
    dir=$1; version=$2; want=$3
    case $dir in /*) ;; *) fail 64 "not an absolute folder: $dir" ;; esac
    case $version in *[!A-Za-z0-9_.+-]* | .* | '') fail 64 "not a release name: $version" ;; esac
    mkdir -p "$dir"
    if [ -f "$dir/$version/SHA256SUMS" ] && [ "$(digest_of "$dir/$version/SHA256SUMS")" = "$want" ] \
        && (cd "$dir/$version" && sha256sum --quiet -c SHA256SUMS > /dev/null 2>&1); then
        cat > /dev/null; echo "present"; return 0
    fi
    [ ! -e "$dir/$version" ] || fail 74 "$dir/$version exists and is another release, or a damaged one"
    part=$dir/.$version.partial
    rm -rf "$part"; mkdir "$part"
    tar -x -f - -C "$part" --no-same-owner || { rm -rf "$part"; fail 69 "the release could not be unpacked below $dir (no room?)"; }
    [ "$(digest_of "$part/SHA256SUMS")" = "$want" ] || { rm -rf "$part"; fail 65 "the release arrived damaged: its SHA256SUMS differs"; }
    (cd "$part" && sha256sum --quiet -c SHA256SUMS) >&2 || { rm -rf "$part"; fail 65 "a file of the release arrived damaged"; }
    sync -f "$part" 2>/dev/null || sync
    mv -T "$part" "$dir/$version"
    echo "installed"
}

verb=${1:?usage: see the head of this file}; shift
case $verb in
    observe | lease | arm | extend | stage | revoke | switch | confirm | undo | guard | _guard | record | evidence | stored | keep | golden | logs | release | _switch | _confirm | _undo) "$verb" "$@" ;;
    check-unit) check_unit "$@" ;;
    keep-golden) keep_golden "$@" ;;
    trial) names "$1"; trial_lines; systemctl show "$UNIT" -p ActiveState,SubState,Result,MainPID,NRestarts,InvocationID,StatusText,ExecMainStatus,ExecMainCode,FragmentPath,NeedDaemonReload | sed 's/^/show./; s/=/ /'; echo "uptime $(cut -d' ' -f1 /proc/uptime)" ;;
    *) fail 64 "no verb $verb" ;;
esac
