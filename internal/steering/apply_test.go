package steering_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/steering"
	"pilaster.io/pilaster/internal/steering/steeringtest"
)

// rig is a node with an uplink and a VXLAN device, and a container behind a veth pair.
type rig struct {
	node, container *netns.Namespace
	of              steering.Steering
}

const queues = 4 // of the uplink

func newRig(t *testing.T) *rig {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	steeringtest.LockTable(t)
	r := &rig{namespace(t, "node"), namespace(t, "container"), steering.Steering{Dir: filepath.Join(t.TempDir(), "s")}}
	t.Cleanup(func() { // the machine's table of flows is not the test's own
		if _, err := r.of.Reset(); err != nil {
			t.Error(err)
		}
	})
	r.add(t, &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0", NumRxQueues: queues}, PeerName: "wire"})
	r.add(t, &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 1, Port: 8472})
	r.attach(t, "cali1")
	return r
}

func namespace(t *testing.T, name string) *netns.Namespace {
	t.Helper()
	ns, err := netns.Create(filepath.Join(t.TempDir(), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(ns.Close(), netns.Remove(ns.Path())); err != nil {
			t.Error(err)
		}
	})
	return ns
}

// change calls use with a netlink handle of the node.
func (r *rig) change(t *testing.T, use func(*netlink.Handle) error) {
	t.Helper()
	h, err := r.node.Netlink()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := netns.Retry(func() error { return use(h) }); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) add(t *testing.T, l netlink.Link) {
	t.Helper()
	r.change(t, func(h *netlink.Handle) error { return h.LinkAdd(l) })
}

func (r *rig) remove(t *testing.T, name string) {
	t.Helper()
	r.change(t, func(h *netlink.Handle) error {
		l, err := h.LinkByName(name)
		if err != nil {
			return err
		}
		return h.LinkDel(l)
	})
}

// attach adds a pair between a device of the node and eth0 of the container.
func (r *rig) attach(t *testing.T, name string) {
	t.Helper()
	pair := netlink.NewVeth(netlink.LinkAttrs{Name: name, Index: 100})
	pair.PeerName, pair.PeerNamespace = "eth0", netlink.NsFd(r.container.FD())
	r.add(t, pair)
}

// all selects all levels.
func (r *rig) all() steering.Selection {
	return steering.Selection{
		Levels: steering.Levels(), Netns: r.node.Path(), Uplinks: []string{"eth0"},
		Containers: []string{r.container.Path()},
	}
}

func (r *rig) apply(t *testing.T, q steering.Request, s steering.Selection) {
	t.Helper()
	devices, err := s.Devices()
	if err == nil {
		err = r.of.Apply(q, devices)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// files reads the steering files of all devices and the machine's table as `ip netns exec` would show them.
func (r *rig) files(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, ns := range []*netns.Namespace{r.node, r.container} {
		c := exec.Command("unshare", "--mount", "sh", "-c",
			"mount -t sysfs none /sys && grep -r . /sys/class/net/*/queues/rx-*/rps_*")
		out, err := output(ns, c)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out) {
			file, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			all[filepath.Base(ns.Path())+strings.TrimPrefix(file, "/sys/class/net")] = value
		}
	}
	b, err := os.ReadFile(steering.TableFile)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	all["table"] = strings.TrimSpace(string(b))
	return all
}

func output(ns *netns.Namespace, c *exec.Cmd) (string, error) {
	var out, complaint strings.Builder
	c.Stdout, c.Stderr = &out, &complaint
	if err := ns.Run(c); err != nil {
		return "", fmt.Errorf("%w: %s", err, &complaint)
	}
	return out.String(), nil
}

// differences lists the files that are not the same.
func differences(before, now map[string]string) (all []string) {
	for file := range now {
		if before[file] != now[file] {
			all = append(all, fmt.Sprintf("%s: %s, now %s", file, before[file], now[file]))
		}
	}
	if len(before) != len(now) {
		all = append(all, fmt.Sprintf("%d files, now %d", len(before), len(now)))
	}
	return all
}

// hasTable reports whether the machine's table of flows can be set from here.
func hasTable() bool {
	return !errors.Is(steering.Request{Mode: steering.RFS}.Check(), steering.ErrNoTable)
}

// modes are requests that this machine accepts: elsewhere than in the first namespace, the table's size is given.
func modes() []steering.Request {
	rfs := steering.Request{Mode: steering.RFS, Flows: 3000}
	if !hasTable() {
		rfs.HostEntries = 4096
	}
	return []steering.Request{{Mode: steering.RPS, CPUs: []int{1}}, rfs, {Mode: steering.Auto}, {Mode: steering.Off}}
}

// TestResetRestoresEveryFile compares all files of all devices before and after, for settings that were there before,
// also after several applies.
func TestResetRestoresEveryFile(t *testing.T) {
	r := newRig(t)
	// Settings of another program.
	c := exec.Command("unshare", "--mount", "sh", "-c", `mount -t sysfs none /sys && cd /sys/class/net &&
		echo 1 > eth0/queues/rx-1/rps_cpus && echo 64 > eth0/queues/rx-2/rps_flow_cnt &&
		echo 2 > flannel.1/queues/rx-0/rps_cpus`)
	if _, err := output(r.node, c); err != nil {
		t.Fatal(err)
	}
	before := r.files(t)
	if len(before) < 2*(queues+2) {
		t.Fatalf("only %d files: %v", len(before), before)
	}
	for _, first := range modes() {
		for _, second := range modes() {
			r.apply(t, first, r.all())
			r.apply(t, second, r.all())
			if s, err := r.of.Status(); err != nil || len(s.Devices) != 3 {
				t.Fatalf("%s, %s: status %+v, %v", first.Mode, second.Mode, s, err)
			}
			if len(differences(before, r.files(t))) == 0 {
				t.Errorf("%s, %s: nothing was changed", first.Mode, second.Mode)
			}
			restored, err := r.of.Reset()
			if err != nil || len(restored) != 3 {
				t.Errorf("%s, %s: restored %v, %v", first.Mode, second.Mode, restored, err)
			}
			if wrong := differences(before, r.files(t)); len(wrong) > 0 {
				t.Errorf("%s, %s: not restored: %q", first.Mode, second.Mode, wrong)
			}
		}
	}
	if restored, err := r.of.Reset(); err != nil || len(restored) > 0 {
		t.Errorf("a second reset: %v, %v", restored, err)
	}
}

// TestWrittenSettings checks the values in the kernel, and that a second apply changes nothing.
func TestWrittenSettings(t *testing.T) {
	r := newRig(t)
	request := modes()[1]
	request.CPUs = []int{0, 1}
	r.apply(t, request, r.all())
	now := r.files(t)
	for file, want := range map[string]string{
		"node/eth0/queues/rx-3/rps_cpus": "3", "node/eth0/queues/rx-3/rps_flow_cnt": "1024",
		"node/flannel.1/queues/rx-0/rps_cpus": "3", "node/flannel.1/queues/rx-0/rps_flow_cnt": "4096",
		"container/eth0/queues/rx-0/rps_cpus": "3", "node/wire/queues/rx-0/rps_cpus": "0",
		"node/cali1/queues/rx-0/rps_cpus": "0",
	} {
		if now[file] != want {
			t.Errorf("%s is %q, want %q", file, now[file], want)
		}
	}
	if hasTable() && now["table"] != "4096" {
		t.Errorf("the table has %s entries, want 4096", now["table"])
	}
	r.apply(t, request, r.all())
	if wrong := differences(now, r.files(t)); len(wrong) > 0 {
		t.Errorf("a second apply changed %q", wrong)
	}
	s, err := r.of.Status()
	if err != nil || s.Devices[0].Before["rx-3/rps_flow_cnt"] != "0" {
		t.Errorf("a second apply changed the record: %+v, %v", s, err)
	}
}

// TestTableHasReferences: the table is restored with the last device that needs it, also if devices are gone.
func TestTableHasReferences(t *testing.T) {
	r := newRig(t)
	before := r.files(t)["table"]
	devices, err := r.all().Devices()
	if err != nil {
		t.Fatal(err)
	}
	request := steering.Request{Mode: steering.RFS, Flows: 4096}
	if !hasTable() {
		t.Log("not in the machine's first network namespace: this test only checks that RFS is refused")
		if err := r.of.Apply(request, devices); !errors.Is(err, steering.ErrNoTable) {
			t.Errorf("got %v, want %v", err, steering.ErrNoTable)
		}
		return
	}
	r.apply(t, request, r.all())
	check := func(what, want string) {
		t.Helper()
		if got := r.files(t)["table"]; got != want {
			t.Errorf("%s: the table has %s entries, want %s", what, got, want)
		}
	}
	if _, err := r.of.Reset(devices[0]); err != nil {
		t.Fatal(err)
	}
	check("two devices left", "4096")
	if err := r.of.Apply(steering.Request{Mode: steering.RPS}, devices[1:2]); err != nil {
		t.Fatal(err)
	}
	check("one device left", "4096")
	r.remove(t, "cali1")
	if _, err := r.of.Reset(devices[1]); err != nil {
		t.Fatal(err)
	}
	check("the last device is gone", before)
}

// TestRefusals: the error says what is wrong, and nothing is changed.
func TestRefusals(t *testing.T) {
	r := newRig(t)
	before := r.files(t)
	with := func(change func(*steering.Selection)) steering.Selection {
		s := r.all()
		change(&s)
		return s
	}
	for _, c := range []struct {
		request   steering.Request
		selection steering.Selection
		want      string
	}{
		{steering.Request{Mode: "rss"}, r.all(), `mode "rss": use off, rps, rfs or auto`},
		{steering.Request{Mode: steering.RPS, CPUs: []int{8000}}, r.all(), "CPU 8000 is not online"},
		{steering.Request{Mode: steering.RPS, Flows: -1}, r.all(), "-1 flows"},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Uplinks = []string{"eth7"} }),
			"device eth7 in " + r.node.Path() + ": there is no such device"},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Uplinks = nil }), "needs --uplink"},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Overlays = []string{"vx"} }),
			"device vx in "},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Levels = nil }), "no level"},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Levels = []string{"pod"} }),
			`level "pod"`},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Levels = []string{"host"} }),
			"--containers needs level container"},
		{steering.Request{Mode: steering.RPS}, with(func(s *steering.Selection) { s.Containers = nil }),
			"needs --containers"},
		{steering.Request{Mode: steering.RPS},
			with(func(s *steering.Selection) { s.Netns, s.Containers = r.container.Path(), []string{r.node.Path()} }),
			"there is no VXLAN device"},
		{steering.Request{Mode: steering.RPS},
			with(func(s *steering.Selection) { s.Containers = []string{"/etc/hosts"} }), "not a namespace"},
	} {
		devices, err := c.selection.Devices()
		if err == nil {
			err = r.of.Apply(c.request, devices)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v, %+v: %v, want %s", c.request, c.selection, err, c.want)
		}
	}
	if wrong := differences(before, r.files(t)); len(wrong) > 0 {
		t.Errorf("changed: %q", wrong)
	}
}

// TestPilasterEndpointsAreRefused: the level has no effect behind bpf_redirect_peer, nor on a macvlan.
func TestPilasterEndpointsAreRefused(t *testing.T) {
	r := newRig(t)
	r.remove(t, "cali1")
	r.attach(t, "pil7")
	if _, err := r.all().Devices(); err == nil || !strings.Contains(err.Error(), "bpf_redirect_peer") {
		t.Errorf("an endpoint of Pilaster: %v", err)
	}
	r.remove(t, "pil7")
	r.change(t, func(h *netlink.Handle) error {
		wire, err := h.LinkByName("wire")
		if err != nil {
			return err
		}
		a := netlink.LinkAttrs{Name: "eth0", ParentIndex: wire.Attrs().Index, Namespace: netlink.NsFd(r.container.FD())}
		return h.LinkAdd(&netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_PRIVATE})
	})
	if _, err := r.all().Devices(); err == nil || !strings.Contains(err.Error(), "macvlan") {
		t.Errorf("a macvlan: %v", err)
	}
}

// TestStatusNamesProblems: a file that another program changed, and a device that is gone. A device of the same name is
// another device: reset leaves it alone.
func TestStatusNamesProblems(t *testing.T) {
	r := newRig(t)
	r.apply(t, steering.Request{Mode: steering.RPS}, r.all())
	c := exec.Command("unshare", "--mount", "sh", "-c",
		"mount -t sysfs none /sys && echo 1 > /sys/class/net/eth0/queues/rx-2/rps_cpus")
	if _, err := output(r.node, c); err != nil {
		t.Fatal(err)
	}
	r.remove(t, "flannel.1")
	r.add(t, &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 2, Port: 8473})
	s, err := r.of.Status()
	if err != nil || len(s.Devices) != 3 {
		t.Fatalf("%+v, %v", s, err)
	}
	for i, want := range []string{"rx-2/rps_cpus is 1", "", ""} {
		d := s.Devices[i]
		if got := d.Problem; !strings.Contains(got, want) || (want == "") != (got == "") || d.Gone != (i == 1) {
			t.Errorf("%v: problem %q, want %q; gone: %v", d.Device, got, want, d.Gone)
		}
	}
	restored, err := r.of.Reset()
	if err != nil || len(restored) != 2 {
		t.Errorf("restored %v, %v", restored, err)
	}
}

// TestFollow: devices are steered when they appear, and again when they are created anew. Others are not.
func TestFollow(t *testing.T) {
	r := newRig(t)
	r.remove(t, "flannel.1")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		of := r.all()
		of.Levels, of.Containers = []string{steering.Host, steering.Overlay}, nil
		ended <- r.of.Follow(ctx, steering.Request{Mode: steering.RPS}, of, slog.New(slog.DiscardHandler))
	}()
	wait := func(name string, want int) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			s, err := r.of.Status()
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, d := range s.Devices {
				if d.Name == name && d.Problem == "" && !d.Gone {
					n++
				}
			}
			if n == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %+v", name, s)
			}
		}
	}
	wait("eth0", 1)
	for id := range 2 {
		r.add(t, &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "pilvxlan"}, VxlanId: id + 1, Port: 8472})
		wait("pilvxlan", 1)
		r.remove(t, "pilvxlan")
		wait("pilvxlan", 0)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if now := r.files(t); now["node/wire/queues/rx-0/rps_cpus"] != "0" {
		t.Errorf("another device was steered: %v", now)
	}
}

func TestDamagedRecord(t *testing.T) {
	of := steering.Steering{Dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(of.Dir, "record.json"), []byte(`{"version":2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := of.Reset(); err == nil || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("a later record: %v", err)
	}
}
