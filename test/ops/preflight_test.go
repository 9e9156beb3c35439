package ops_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// candidate is a machine on the fabric that is not a node: the orchestrator's machine.
type candidate struct {
	*lab.Lab
	ns  *netns.Namespace
	tmp string
}

type check struct{ Check, State, Says, Do string }

func (c *candidate) preflight(ctx context.Context, t *testing.T, args ...string) (status int, checks []check) {
	t.Helper()
	var out, complaint bytes.Buffer
	cmd := exec.CommandContext(ctx, labtest.Binary(t), append([]string{"preflight", "-o", "json"}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, &complaint, append(os.Environ(), "TMPDIR="+c.tmp)
	status, ok := lab.ExitStatus(c.ns.Run(cmd))
	if err := json.Unmarshal(out.Bytes(), &checks); !ok || err != nil {
		t.Fatalf("preflight %v: exit %d, %v\n%s%s", args, status, err, &out, &complaint)
	}
	return status, checks
}

func newCandidate(t *testing.T) (*candidate, []string) {
	c := &candidate{Lab: labtest.New(t, lab.Spec{Nodes: []string{name}}), tmp: t.TempDir()}
	var err error
	c.ns, err = c.Namespace(lab.Orchestrator)
	must(t, err)
	t.Cleanup(func() { c.ns.Close() })
	return c, []string{"--uplink", lab.Uplink, "--orchestrator", c.OrchestratorURL(), "--token-file", c.TokenFile()}
}

func TestPreflightChangesNothing(t *testing.T) {
	c, args := newCandidate(t)
	ctx := labtest.Context(t)
	before := look(ctx, t, c.ns, c.tmp)
	status, checks := c.preflight(ctx, t, args...)
	var unchecked []string
	for _, one := range checks {
		switch {
		case one.State == "todo" && one.Do != "" && strings.HasPrefix(one.Says,
			"not checked: this machine has no prefix"):
			unchecked = append(unchecked, one.Check)
		case one.State != "ok" || one.Says == "" || one.Do != "":
			t.Errorf("%+v", one)
		}
	}
	if want := []string{"route to this node", "source check"}; status != 0 || len(checks) != 20 ||
		!slices.Equal(unchecked, want) {
		t.Errorf("got exit status %d, %d checks", status, len(checks))
	}
	for _, d := range before.differences(look(ctx, t, c.ns, c.tmp)) {
		t.Error(d)
	}
}

// TestPreflightNamesWhatIsWrong breaks one thing at a time. Only the corresponding check must report it.
func TestPreflightNamesWhatIsWrong(t *testing.T) {
	c, args := newCandidate(t)
	other := filepath.Join(t.TempDir(), "token")
	token := "pilaster." + strings.Repeat("0", 32) + "." + strings.Repeat("0", 64)
	must(t, os.WriteFile(other, []byte(token), 0o600))
	for _, spoil := range []struct {
		check, state, says string
		spoil, mend        string // commands in the namespace, and sysctls of IPv6, one per line
		args               []string
	}{
		{check: "uplink", state: "fail", says: "nothing0", args: []string{"--uplink", "nothing0"}},
		{check: "uplink", state: "fail", says: "IPv6 is disabled on v0",
			spoil: "ip link add v0 type veth peer name v1\nip link set v1 up\nip link set v0 up\nv0/disable_ipv6=1",
			mend:  "ip link del v0",
			args:  []string{"--uplink", "v0"}},
		{check: "uplink", state: "fail", says: "v0 is down", spoil: "ip link add v0 type veth peer name v1",
			mend: "ip link del v0", args: []string{"--uplink", "v0"}},
		{check: "uplink", state: "fail", says: "lo is not an Ethernet device", args: []string{"--uplink", "lo"}},
		{check: "mtu", state: "fail", says: "below IPv6's minimum of 1280", args: []string{"--mtu-reserve", "300"}},
		{check: "mtu", state: "warn", says: "announces 1400", spoil: "eth0/mtu=1400", mend: "eth0/mtu=1500"},
		{check: "mtu", state: "todo", says: "containers get an MTU of 9000; not checked",
			spoil: "ip link set eth0 mtu 9000", mend: "ip link set eth0 mtu 1500"},
		{check: "device", state: "warn", says: "containers get macvlans on eth0",
			args: []string{"--device", "macvlan"}},
		{check: "device", state: "fail", says: "uplink m0 is a macvlan",
			spoil: "ip link add m0 link eth0 type macvlan\nip link set m0 up", mend: "ip link del m0",
			args: []string{"--uplink", "m0", "--device", "macvlan"}},
		{check: "private prefix", state: "fail", says: "fc00:f853:ccd:e793::/64 on lo",
			spoil: "ip addr add fc00:f853:ccd:e793::1/64 dev lo", mend: "ip addr del fc00:f853:ccd:e793::1/64 dev lo"},
		{check: "base prefix", state: "fail", says: "fd70:696c:6109::/64 on v0",
			spoil: "ip link add v0 type veth peer name v1\nip link set v1 up\nip link set v0 up\nip addr add " +
				"fd70:696c:6109::1/64 dev v0 nodad", mend: "ip link del v0"},
		{check: "way to nodes", state: "warn", says: "no route to other nodes", spoil: "ip -6 route del default",
			mend: "ip -6 route add default via 2001:db8:70::1"},
		{check: "way to nodes", state: "warn", says: "leave by lo",
			spoil: "ip -6 route add local fd70:696c:6100::/40 dev lo",
			mend:  "ip -6 route del local fd70:696c:6100::/40 dev lo"},
		{check: "way to nodes", state: "warn", says: "which is not the first uplink",
			spoil: "ip link add v0 type veth peer name v1\nip link set v1 up\nip link set v0 up",
			mend:  "ip link del v0", args: []string{"--uplink", "v0", "--uplink", lab.Uplink}},
		{check: "way to hosts outside", state: "warn", says: "the default route is by v0",
			spoil: "ip link add v0 type veth peer name v1\nip link set v1 up\nip link set v0 up\nip -6 route add " +
				"fd70:696c:6100::/40 via 2001:db8:70::1\nip -6 route add default dev v0 metric 1",
			mend: "ip link del v0\nip -6 route del fd70:696c:6100::/40"},
		{check: "router advertisements", state: "fail", says: "the route will expire",
			spoil: "ip -6 route add default via 2001:db8:70::1 proto ra metric " +
				"2048\neth0/forwarding=1\neth0/accept_ra=1",
			mend: "ip -6 route del default metric 2048\neth0/forwarding=0\neth0/accept_ra=0"},
		{check: "orchestrator", state: "fail", says: "the join token is of another cluster",
			args: []string{"--token-file", other}},
		{check: "orchestrator", state: "fail", says: "connection refused",
			args: []string{"--orchestrator", "https://[::1]:9"}},
		{check: "orchestrator", state: "fail", says: "https://host:port", args: []string{"--orchestrator", "[::1]:9"}},
	} {
		t.Run(spoil.says, func(t *testing.T) {
			ctx := labtest.Context(t)
			c.commands(ctx, t, spoil.spoil)
			rest := args
			if len(spoil.args) > 0 && spoil.args[0] == "--uplink" {
				rest = args[2:]
			}
			status, checks := c.preflight(ctx, t, append(slices.Clone(rest), spoil.args...)...)
			c.commands(ctx, t, spoil.mend)
			if len(rest) < len(args) && !slices.Contains(spoil.args, lab.Uplink) { // no route is by this uplink
				checks = slices.DeleteFunc(checks, func(one check) bool {
					return strings.HasPrefix(one.Check, "way to ")
				})
			}
			c.only(t, spoil.check, spoil.state, spoil.says, checks)
			if want := map[string]int{"warn": 0, "todo": 0, "fail": 1}[spoil.state]; status != want {
				t.Errorf("got exit status %d", status)
			}
		})
	}
}

func (c *candidate) commands(ctx context.Context, t *testing.T, lines string) {
	t.Helper()
	for line := range strings.Lines(lines) {
		setting, value, isSetting := strings.Cut(strings.TrimSpace(line), "=")
		if !isSetting {
			say(ctx, t, c.ns, line)
			continue
		}
		must(t, c.ns.Do(func() error { return os.WriteFile("/proc/sys/net/ipv6/conf/"+setting, []byte(value), 0) }))
	}
}

// only checks that one check has the expected result and names a remedy, and that the others are ok.
func (c *candidate) only(t *testing.T, name, state, says string, checks []check) {
	t.Helper()
	if !slices.ContainsFunc(checks, func(one check) bool { return one.Check == name }) {
		t.Errorf("no check %q", name)
	}
	for _, one := range checks {
		switch {
		case one.Check != name && one.State != "ok" && one.State != "todo":
			t.Errorf("%+v", one)
		case one.Check == name && (one.State != state || !strings.Contains(one.Says, says) || one.Do == ""):
			t.Errorf("got %+v, want %s with %q", one, state, says)
		}
	}
}

// TestPreflightChoosesTheDevice: preflight chooses the device by the kernel's features, and reports why.
func TestPreflightChoosesTheDevice(t *testing.T) {
	c, args := newCandidate(t)
	ctx := labtest.Context(t)
	kind, why := device.ChooseDevice(device.Auto)
	netkit := check{Check: "device", State: "ok", Says: "containers get netkit devices"}
	if err := device.HasNetkit(); err != nil {
		netkit = check{Check: "device", State: "fail", Says: err.Error(),
			Do: "choose another --device: veth, macvlan, auto"}
	}
	for device, want := range map[string]check{
		device.Auto:     {Check: "device", State: "ok", Says: "containers get " + kind + " devices: " + why},
		endpoint.Netkit: netkit,
	} {
		_, checks := c.preflight(ctx, t, append(slices.Clone(args), "--device", device)...)
		if !slices.Contains(checks, want) {
			t.Errorf("%s: got %+v, want %+v", device, checks, want)
		}
	}
}

// TestPreflightOfAnotherDevice: the device kind of a node can change, except if policies would then no longer apply to
// containers with macvlans.
func TestPreflightOfAnotherDevice(t *testing.T) {
	ctx := labtest.Context(t)
	for _, has := range []string{endpoint.Veth, endpoint.Macvlan} {
		t.Run(has, func(t *testing.T) {
			c := &candidate{tmp: t.TempDir(), Lab: labtest.New(t, lab.Spec{
				Nodes: []string{name}, Device: has, Tenants: []lab.Tenant{{Name: "blue"}},
				Containers: []lab.Container{{Name: "b1", Node: name, Tenant: "blue"}},
			})}
			var err error
			c.ns, err = c.Namespace(name)
			must(t, err)
			defer c.ns.Close()
			device := func(kind string) check {
				_, checks := c.preflight(ctx, t, "--uplink", lab.Uplink, "--bpffs", c.BPF(name), "--state-dir",
					filepath.Join(c.Folder(), "nodes", name, "state"), "--device", kind)
				return checks[slices.IndexFunc(checks, func(one check) bool { return one.Check == "device" })]
			}
			want := func(kind, state, says string) {
				t.Helper()
				if is := device(kind); is.State != state || is.Says != says {
					t.Errorf("--device %s: got %+v, want %s: %s", kind, is, state, says)
				}
			}
			listed, err := c.Output(ctx, name, labtest.Binary(t), "endpoint", "list", "-o", "json")
			if err != nil || !strings.Contains(string(listed), `"deviceKind": "`+has+`"`) {
				t.Errorf("%v\n%s", err, listed)
			}
			if has == endpoint.Veth {
				want(endpoint.Veth, "ok", "containers get veth devices")
				want(endpoint.Macvlan, "warn", "containers get macvlans on eth0; the agent on this node has another "+
					"--device, and can be restarted with this one: existing containers keep their devices")
				return
			}
			want(endpoint.Macvlan, "warn", "containers get macvlans on eth0")
			want(endpoint.Veth, "fail", "endpoints with a macvlan: 1, the first of them endpoint 1")
			must(t, c.RemoveContainer(ctx, "b1"))
			want(endpoint.Veth, "ok", "containers get veth devices; the agent on this node has --device macvlan, and "+
				"can be restarted with this one")
		})
	}
}

// TestPreflightBesideOpenVSwitch: the base prefix check ignores the agent's own devices and routes.
func TestPreflightBesideOpenVSwitch(t *testing.T) {
	ctx := labtest.Context(t)
	c := &candidate{tmp: t.TempDir(),
		Lab: labtest.New(t, lab.Spec{Nodes: []string{name}, Device: endpoint.Veth,
			LabKeys: labtest.Switch(lab.OVS, nil), Tenants: []lab.Tenant{{Name: "blue", Network: "nimitz",
				CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}},
			Containers: []lab.Container{{Name: "b1", Node: name, Tenant: "blue"}}})}
	var err error
	c.ns, err = c.Namespace(name)
	must(t, err)
	defer c.ns.Close()
	args := []string{"--uplink", lab.Uplink, "--bpffs", c.BPF(name), "--state-dir",
		filepath.Join(c.Folder(), "nodes", name, "state")}
	status, checks := c.preflight(ctx, t, args...)
	at := slices.IndexFunc(checks, func(one check) bool { return one.Check == "base prefix" })
	if status != 0 || at < 0 || checks[at].State != "ok" {
		t.Errorf("exit %d\n%+v", status, checks)
	}
	_, checks = c.preflight(ctx, t, append(args, "--device", endpoint.Macvlan)...)
	at = slices.IndexFunc(checks, func(one check) bool { return one.Check == "device" })
	if checks[at].State != "fail" || !strings.Contains(checks[at].Says, "endpoint 1 is on network nimitz") {
		t.Errorf("%+v", checks[at])
	}
}

// TestPreflightSeesOtherPrograms: preflight reports programs that will receive no packets because of our programs, and
// programs that receive packets before ours.
func TestPreflightSeesOtherPrograms(t *testing.T) {
	c, args := newCandidate(t)
	ctx := labtest.Context(t)
	foreign := attach(t, c.ns, "foreign")
	_, checks := c.preflight(ctx, t, args...)
	c.only(t, "other programs", "warn", "foreign on eth0 will receive no packets", checks)
	must(t, foreign.Close())

	// Interfaces that will be guarded are listed, without a warning.
	c.commands(ctx, t, "ip link add v0 type veth peer name v1\nip link add br0 type bridge\nip link set v1 master br0")
	_, checks = c.preflight(ctx, t, args...)
	at := slices.IndexFunc(checks, func(one check) bool { return one.Check == "other interfaces" })
	if at < 0 || checks[at].State != "ok" || !strings.Contains(checks[at].Says, "v0") ||
		!strings.Contains(checks[at].Says, "br0") || strings.Contains(checks[at].Says, "v1") {
		t.Errorf("%+v", checks)
	}
	c.commands(ctx, t, "ip link del v0\nip link del br0")

	xdp, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "foreign", Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	must(t, err)
	defer xdp.Close()
	h, err := c.ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName(lab.Uplink)
	must(t, err)
	must(t, c.ns.Do(func() error { return netlink.LinkSetXdpFdWithFlags(eth0, xdp.FD(), 2) })) // XDP_FLAGS_SKB_MODE
	_, checks = c.preflight(ctx, t, args...)
	c.only(t, "other programs", "warn", "an XDP program", checks)

	node := &candidate{Lab: c.Lab, tmp: c.tmp}
	node.ns, err = c.Namespace(name)
	must(t, err)
	defer node.ns.Close()
	_, checks = node.preflight(ctx, t, args...)
	c.only(t, "other programs", "fail", "of another agent, whose pins are not in /sys/fs/bpf/pilaster", checks)
	args = append(args, "--bpffs", c.BPF(name), "--state-dir", filepath.Join(c.Folder(), "nodes", name, "state"))
	if status, checks := node.preflight(ctx, t, args...); status != 0 ||
		slices.ContainsFunc(checks, func(one check) bool { return one.State != "ok" }) {
		t.Errorf("on a node with a running agent: got exit status %d\n%+v", status, checks)
	}
	node.asksTheFabric(ctx, t, args)
	defer attach(t, node.ns, "first").Close()
	_, checks = node.preflight(ctx, t, args...)
	c.only(t, "other programs", "warn", "programs on eth0 before the agent's: first", checks)
}

// asksTheFabric checks that preflight sends packets, and detects the fabric's route and source check from the packets
// that return.
func (c *candidate) asksTheFabric(ctx context.Context, t *testing.T, args []string) {
	t.Helper()
	router, err := c.Namespace(lab.Router)
	must(t, err)
	defer router.Close()
	prefix, err := c.Prefix(name)
	must(t, err)
	via := strings.Fields(say(ctx, t, router, "ip -6 route show "+prefix.String()))
	if len(via) < 5 {
		t.Fatalf("route to %v: %q", prefix, via)
	}
	say(ctx, t, router, "ip -6 route del "+prefix.String())
	_, checks := c.preflight(ctx, t, args...)
	c.only(t, "route to this node", "warn", "did not come back", checks)
	say(ctx, t, router, "ip -6 route add "+strings.Join(via[:5], " "))

	egress := append(args, "--egress-prefix", "2001:db8:e::/48")
	_, checks = c.preflight(ctx, t, egress...)
	c.only(t, "route of egress addresses", "warn",
		"2001:db8:e:1::/64, sent to the router of eth0, did not come back", checks)
	say(ctx, t, router, "ip -6 route add 2001:db8:e:1::/64 "+strings.Join(via[1:5], " "))
	has := func(name, state string) bool {
		return slices.ContainsFunc(checks, func(one check) bool { return one.Check == name && one.State == state })
	}
	var status int
	if status, checks = c.preflight(ctx, t, egress...); status != 0 || !has("route of egress addresses", "ok") {
		t.Errorf("with the route of egress addresses: exit status %d, %+v", status, checks)
	}
	say(ctx, t, router, "ip -6 route del 2001:db8:e:1::/64")
	say(ctx, t, c.ns, "ip addr add 2001:db8:e:7::1/128 dev lo")
	_, checks = c.preflight(ctx, t, egress...)
	say(ctx, t, c.ns, "ip addr del 2001:db8:e:7::1/128 dev lo")
	if !has("egress prefix", "fail") {
		t.Errorf("with an address of the egress prefix: %+v", checks)
	}

	rules := say(ctx, t, router, "ip -6 rule")
	say(ctx, t, router, "ip -6 rule del iif "+name+" blackhole")
	_, checks = c.preflight(ctx, t, args...)
	c.only(t, "source check", "warn", "forwards packets of this machine with the false source fd70:696c:6100:", checks)
	say(ctx, t, router, "ip -6 rule add iif "+name+" blackhole priority 2000")
	if is := say(ctx, t, router, "ip -6 rule"); is != rules {
		t.Errorf("the rules changed: got\n%swant\n%s", is, rules)
	}
}

// attach attaches a program that accepts every packet, as the first program on a namespace's uplink.
func attach(t *testing.T, ns *netns.Namespace, name string) (l link.Link) {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	must(t, err)
	defer p.Close()
	h, err := ns.Netlink()
	must(t, err)
	defer h.Close()
	eth0, err := h.LinkByName(lab.Uplink)
	must(t, err)
	must(t, ns.Do(func() (err error) {
		l, err = link.AttachTCX(link.TCXOptions{Interface: eth0.Attrs().Index, Program: p,
			Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	}))
	return l
}

func TestPreflightOfAnyone(t *testing.T) {
	// Copy the binary to a folder where any user can execute it.
	binary := filepath.Join(os.TempDir(), fmt.Sprintf("pilaster-anyone-%d", os.Getpid()))
	b, err := os.ReadFile(labtest.Binary(t))
	must(t, err)
	must(t, os.WriteFile(binary, b, 0o755))
	defer os.Remove(binary)
	cmd := exec.CommandContext(labtest.Context(t), binary, "preflight", "--uplink", "lo")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if status, _ := lab.ExitStatus(err); status != 1 || !strings.Contains(string(out), "fail   privileges") ||
		!strings.Contains(string(out), "not tested; see privileges") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestSecondAgentIsRefusedBeforeItJoins: a second agent on the same uplink gets neither a name nor a prefix.
func TestSecondAgentIsRefusedBeforeItJoins(t *testing.T) {
	c, args := newCandidate(t)
	ctx := labtest.Context(t)
	nodes := func() (all []string) {
		resp, err := c.Operator().ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		must(t, err)
		for _, n := range resp.Msg.Nodes {
			all = append(all, n.Name+" "+n.Prefix)
		}
		return all
	}
	before := nodes()
	ns, err := c.Namespace(name)
	must(t, err)
	defer ns.Close()
	var complaint bytes.Buffer
	state := filepath.Join(t.TempDir(), "state")
	cmd := exec.CommandContext(ctx, labtest.Binary(t),
		append([]string{"agent", "--node-name", "second", "--state-dir", state, "--run-dir", t.TempDir(),
			"--bpffs", filepath.Join(t.TempDir(), "bpf")}, args...)...)
	cmd.Stderr = &complaint
	if status, ok := lab.ExitStatus(ns.Run(cmd)); !ok || status != 1 ||
		!strings.Contains(complaint.String(), "of another agent") ||
		!strings.Contains(complaint.String(), "nothing was changed") {
		t.Errorf("exit %d\n%s", status, &complaint)
	}
	if is := nodes(); !slices.Equal(is, before) {
		t.Errorf("the nodes changed: got %v, want %v", is, before)
	}
	if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a state directory remains: %v", err)
	}
}
