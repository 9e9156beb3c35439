// Package labtest creates labs for tests, with binaries built from this source tree.
package labtest

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/packet"
	"pilaster.io/pilaster/internal/tenant"
)

// Patience is the timeout of New and of Context: 2 minutes, or PILASTER_TEST_PATIENCE on a slow machine.
var Patience = patience()

func patience() time.Duration {
	if d, err := time.ParseDuration(os.Getenv("PILASTER_TEST_PATIENCE")); err == nil {
		return d
	}
	return 2 * time.Minute
}

// New brings a lab up and removes it at the end of the test. If the spec has no name, the name derives from the test's
// name. If the test fails, New logs the end of every daemon's log.
func New(t testing.TB, spec lab.Spec, options ...func(*lab.Options)) *lab.Lab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	spec.Name = cmp.Or(spec.Name, Name(t))
	spec.Device = cmp.Or(spec.Device, Device())
	o := lab.Options{Binary: Binary(t), WithoutCgroups: OtherIsRelease() && !otherKnows(t, "--cgroup-root")}
	for _, set := range options {
		set(&o)
	}
	l, err := lab.Up(Context(t), spec, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, l)
		}
		// The test's own context has ended.
		ctx, cancel := context.WithTimeout(context.Background(), Patience)
		defer cancel()
		if err := l.Down(ctx); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Device is the kind of the containers' devices in tests: PILASTER_TEST_DEVICE, or veth.
func Device() string { return cmp.Or(os.Getenv("PILASTER_TEST_DEVICE"), endpoint.Veth) }

// Uplinks is the number of uplinks of nodes in suites that run with one and with two: PILASTER_TEST_UPLINKS, or one.
func Uplinks() int {
	if os.Getenv("PILASTER_TEST_UPLINKS") == "2" {
		return 2
	}
	return 1
}

// NetworkVariable is the variable with the network of the tenants in suites that run on each network.
const NetworkVariable = "PILASTER_TEST_NETWORK"

// Network is the network of the tenants in suites that run on each network: NetworkVariable, or the default.
func Network() string { return cmp.Or(os.Getenv(NetworkVariable), tenant.DefaultNetwork) }

// Tenant returns a tenant on Network. If its addresses are its own, the nodes have no subnets of the CIDR, so that each
// container has a mapping. number distinguishes the CIDRs of tenants.
func Tenant(name string, number byte) lab.Tenant {
	t := lab.Tenant{Name: name, Network: Network()}
	if on, _ := tenant.TraitsOf(t.Network); slices.Contains(on.Addressings, tenant.Own) {
		cidr := netip.AddrFrom16([16]byte{0xfd, 0x12, number})
		t.CIDRs, t.NoNodeCIDRs = []netip.Prefix{netip.PrefixFrom(cidr, 48)}, true
	}
	return t
}

// Context ends with the test, or after Patience.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	t.Cleanup(cancel)
	return ctx
}

// Isolated checks that each container reaches the containers that it must reach, and no others.
func Isolated(t testing.TB, l *lab.Lab, when string) {
	t.Helper()
	echoes, err := l.PingAll(Context(t), packet.PingOptions{Timeout: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range echoes {
		if must, err := l.MustReach(e.From, e.To); err != nil || must != e.Reached() {
			t.Errorf("%s: %s reaches %s: got %v, want %v (%v)", when, e.From, e.To, e.Reached(), must, err)
		}
	}
}

// Until waits for a condition, for the given time at most.
func Until(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("after %v: not %s", limit, what)
		}
	}
}

// Name returns a lab name that no concurrent test uses.
func Name(t testing.TB) string {
	t.Helper()
	letters := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, strings.ToLower(strings.TrimPrefix(t.Name(), "Test")))
	return fmt.Sprintf("t%.12s-%d", letters, os.Getpid())
}

var build struct {
	sync.Once
	binary string
	err    error
}

// Binary returns the path of a pilaster binary of this source tree, with pilaster-cni in the same folder.
// PILASTER_TEST_BINARY names an existing one, for machines where building takes minutes.
func Binary(t testing.TB) string {
	t.Helper()
	build.Do(func() { build.binary, build.err = makeBinary() })
	if build.err != nil {
		t.Fatal(build.err)
	}
	return build.binary
}

func makeBinary() (string, error) {
	if made := os.Getenv("PILASTER_TEST_BINARY"); made != "" {
		return made, nil
	}
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("find the source tree: %w", err)
	}
	tree := filepath.Dir(strings.TrimSpace(string(out)))
	unlock, err := lock(tree)
	if err != nil {
		return "", err
	}
	defer unlock()
	if out, err := exec.Command("make", "-C", tree, "build").CombinedOutput(); err != nil {
		return "", fmt.Errorf("make build: %w\n%s", err, out)
	}
	return filepath.Join(tree, "bin", "pilaster"), nil
}

// lock serializes concurrent test binaries, so that only the first one builds.
func lock(tree string) (unlock func() error, err error) {
	if err := os.MkdirAll(filepath.Join(tree, "bin"), 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(tree, "bin", ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return f.Close, nil
}

func showLogs(t testing.TB, l *lab.Lab) {
	logs, _ := filepath.Glob(filepath.Join(l.Folder(), "log", "*.log"))
	for _, path := range logs {
		b, err := os.ReadFile(path)
		if err != nil || len(b) == 0 {
			continue
		}
		t.Logf("%s:\n%s", filepath.Base(path), b[max(0, len(b)-4000):])
	}
}

// Number returns the number in an environment variable, such as a seed, or the usual one.
func Number(t testing.TB, variable string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}
