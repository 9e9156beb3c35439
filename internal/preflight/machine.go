package preflight

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/bench/scenario"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/packet"
)

// needed are the capabilities that the agent's systemd unit grants.
var needed = []struct {
	name string
	bit  int
}{
	{"NET_ADMIN", unix.CAP_NET_ADMIN}, {"NET_RAW", unix.CAP_NET_RAW}, {"SYS_PTRACE", unix.CAP_SYS_PTRACE},
	{"SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"PERFMON", unix.CAP_PERFMON}, {"BPF", unix.CAP_BPF},
}

func privileges() Result {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var held [2]unix.CapUserData
	if err := unix.Capget(&header, &held[0]); err != nil {
		return unknown(err)
	}
	var missing []string
	for _, c := range needed {
		if held[c.bit/32].Effective&(1<<(c.bit%32)) == 0 {
			missing = append(missing, "CAP_"+c.name)
		}
	}
	switch {
	case os.Geteuid() != 0:
		return fail("run it as root, like the agent", "this process does not run as root")
	case len(missing) > 0:
		return fail(
			"add these capabilities; a container must be privileged",
			"root lacks %s",
			strings.Join(missing, ", "),
		)
	}
	return ok("root with the agent's %d capabilities", len(needed))
}

// The oldest kernel with all features.
const wantMajor, wantMinor = 6, 12

func kernel() Result {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return unknown(err)
	}
	return kernelVersion(unix.ByteSliceToString(u.Release[:]))
}

func kernelVersion(release string) Result {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return fail("use a release of Linux", "Linux %q has no version", release)
	}
	if major < wantMajor || major == wantMajor && minor < wantMinor {
		return fail(fmt.Sprintf("use Linux %d.%d or newer", wantMajor, wantMinor), "Linux %s is too old", release)
	}
	return ok("Linux %s", release)
}

func types() Result {
	if _, err := btf.LoadKernelSpec(); err != nil {
		return fail("use a kernel with CONFIG_DEBUG_INFO_BTF", "the kernel has no type information (BTF): %v", err)
	}
	return ok("the kernel has type information (BTF)")
}

// bpffs checks the folder of the pins. The agent creates the folder, and mounts bpffs if it is missing.
func bpffs(dir string) Result {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return unknown(err)
	}
	there := dir
	var fs unix.Statfs_t
	for unix.Statfs(there, &fs) != nil && there != "/" {
		there = filepath.Dir(there)
	}
	if err := host.CheckBPFFS(dir); err != nil {
		return failed(err, "mount bpffs on the machine")
	}
	if fs.Type == unix.BPF_FS_MAGIC {
		return ok("pins go to %s, on the mounted bpffs", dir)
	}
	known, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return unknown(err)
	}
	if !strings.Contains(string(known), "\tbpf\n") {
		return fail(
			"use a kernel with CONFIG_BPF_SYSCALL",
			"the kernel has no bpffs, so nothing can be pinned in %s",
			dir,
		)
	}
	return ok("pins go to %s; the agent mounts bpffs there", dir)
}

// packetPath sends packets between two nodes in temporary namespaces, because only its use proves that a kernel feature
// works. The machine's own packets are not affected.
func packetPath(ctx context.Context, rights Result) Result {
	if rights.State != OK {
		return fail("see privileges", "not tested")
	}
	dir, err := os.MkdirTemp("", "pilaster-preflight-")
	if err != nil {
		return unknown(err)
	}
	defer os.RemoveAll(dir)
	err = scenario.Once(filepath.Join(dir, "wire"), scenario.Netpila(), func(p scenario.Pair) error {
		r, err := packet.Ping(ctx, p.Client, p.Target, packet.PingOptions{Count: 3})
		if err == nil && r.Received == 0 {
			err = errors.New("programs load, but no packet arrives from container to container")
		}
		return err
	})
	if err != nil {
		return failed(
			err,
			"use Linux 6.12 or newer with tcx, clsact, cls_bpf, veth and the bpf_crypto kfuncs with ecb(aes)",
		)
	}
	return ok("tested: programs on tcx and clsact, AES-128 in them (ecb(aes)), an echo between containers of two nodes")
}

// ofNetwork tests kernel features that only one network needs.
func ofNetwork(c module.Check, rights Result) Result {
	if rights.State != OK {
		return fail("see privileges", "not tested")
	}
	dir, err := os.MkdirTemp("", "pilaster-preflight-")
	if err != nil {
		return unknown(err)
	}
	defer os.RemoveAll(dir)
	if err := c.Try(dir); err != nil {
		return warn(c.Advice, "%s: %v", c.Without, err)
	}
	return ok("tested: %s", c.Proves)
}

// ownClock asks the kernel whether the clock is synchronized, if there is no orchestrator to compare with.
func ownClock() Result {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	if err != nil {
		return unknown(err)
	}
	now := time.Now().UTC().Format(time.RFC3339)
	if state == unix.TIME_ERROR {
		return warn(
			"synchronise it, or compare it with --orchestrator and --token-file",
			"the clock shows %s and is not synchronised",
			now,
		)
	}
	return ok("the clock shows %s and is synchronised", now)
}
