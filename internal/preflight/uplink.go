package preflight

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// findUplink is nil where there is no such device to look at further.
func findUplink(name string) (netlink.Link, Result) {
	uplink, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fail("name the device to the fabric with --uplink", "uplink %s: %v", name, err)
	}
	if uplink.Attrs().Flags&net.FlagUp == 0 || uplink.Attrs().OperState == netlink.OperDown {
		return uplink, fail("set it up: ip link set "+name+" up; look at its cable or peer", "%s is down", name)
	}
	if kind := uplink.Attrs().EncapType; kind != datapath.UplinkKind {
		return uplink, fail("name an Ethernet device with --uplink", "%s is no Ethernet device (%s)", name, kind)
	}
	if ipv6(name, "disable_ipv6") != "0" {
		return uplink, fail("sysctl -w net.ipv6.conf."+name+".disable_ipv6=0", "%s has IPv6 switched off", name)
	}
	addrs, err := netns.List(func() ([]netlink.Addr, error) { return netlink.AddrList(uplink, unix.AF_INET6) })
	if err != nil {
		return uplink, unknown(err)
	}
	usable := slices.DeleteFunc(addrs, func(a netlink.Addr) bool {
		return a.Flags&(unix.IFA_F_DADFAILED|unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) != 0
	})
	if len(usable) == 0 {
		return uplink, fail(
			"give it one, a link-local one at least: the fabric routes to it",
			"%s has no IPv6 address that lasts",
			name,
		)
	}
	return uplink, ok("%s is up with %v", name, usable[0].IP)
}

func checkDevice(uplink netlink.Link, choice string, there []endpoint.Record) Result {
	kind, why := device.ChooseDevice(choice)
	if err := cmp.Or(device.CheckDeviceUplink(kind, uplink), device.CheckDeviceKinds(kind, there)); err != nil {
		return failed(err, "use --device veth")
	}
	if i := slices.IndexFunc(there, onNimitz); i >= 0 && kind == endpoint.Macvlan {
		return fail(
			"use --device veth, or move the tenants to network netpila first",
			"endpoint %d is on network nimitz, and an agent with --device macvlan carries none of it",
			there[i].ID,
		)
	}
	if why != "" {
		why = ": " + why
	}
	other := changes(uplink, kind)
	if kind == endpoint.Macvlan {
		return warn(
			"use veth where a container has CAP_NET_ADMIN: behind a macvlan that lets it listen to the node "+
				"(docs/howto/devices.md)",
			"containers get macvlans on %s%s",
			uplink.Attrs().Name,
			other,
		)
	}
	return ok("containers get %s devices%s%s", kind, why, other)
}

func onNimitz(r endpoint.Record) bool {
	return slices.ContainsFunc(r.Attachments, func(a endpoint.Attachment) bool { return a.Network == tenant.Nimitz })
}

// changes reports whether an agent runs here with another kind of device.
func changes(uplink netlink.Link, kind string) string {
	chain, err := datapath.Chain(uplink, ebpf.AttachTCXIngress)
	if err != nil { // the check of other programs reports it
		return ""
	}
	has := func(prefix string) bool {
		return slices.ContainsFunc(
			chain.Programs,
			func(p datapath.HookedProgram) bool { return strings.HasPrefix(p.Name, prefix) },
		)
	}
	switch macvlans := has(guard); {
	case !has(ours) || macvlans == (kind == endpoint.Macvlan):
		return ""
	case macvlans:
		return "; the agent that is here has --device macvlan, and may be started again with this one"
	}
	return "; the agent that is here has another --device, and may be started again with this one: containers that " +
		"are there keep theirs"
}

func mtu(uplink netlink.Link, reserve int) Result {
	const (
		least    = 1280 // RFC 8200 §5
		ethernet = 1500
	)
	left := uplink.Attrs().MTU - reserve
	if left < least {
		return fail(
			"raise the one or lower the other",
			"%s has an MTU of %d, less a reserve of %d that is under IPv6's %d",
			uplink.Attrs().Name,
			uplink.Attrs().MTU,
			reserve,
			least,
		)
	}
	name := uplink.Attrs().Name
	// A router may announce less than the device takes (RFC 4861 §4.6.4); the kernel keeps that apart.
	if announced, err := strconv.Atoi(ipv6(name, "mtu")); err == nil && announced < uplink.Attrs().MTU {
		return warn(
			fmt.Sprintf(
				"ip link set %s mtu %d, or give the agent --mtu-reserve %d",
				name,
				announced,
				uplink.Attrs().MTU-announced+reserve,
			),
			"containers get %d bytes, but the router of %s announces %d: larger packets are lost",
			left,
			name,
			announced,
		)
	}
	if left > ethernet {
		return todo(
			fmt.Sprintf("on the way to each other node: ping -M do -s %d, and 'pilaster preflight' there", left-48),
			"containers get %d bytes; not checked: whether all nodes and the fabric between them carry as much",
			left,
		)
	}
	return ok("containers get %d bytes", left)
}

// What names of our programs on the uplink begin with, and of those behind them where containers have macvlans.
const (
	ours  = "pil_uplink_"
	guard = "pil_guard_"
)

// otherPrograms reports other programs that receive packets. The agent's is first in the chain; XDP runs before it.
func otherPrograms(uplink netlink.Link, bpffs string, rights Result) Result {
	name := uplink.Attrs().Name
	if xdp := uplink.Attrs().Xdp; xdp != nil && xdp.Attached {
		return warn(
			"see that it passes IPv6 on",
			"an XDP program (id %d) on %s sees containers' packets before ours",
			xdp.ProgId,
			name,
		)
	}
	pinned := map[uint32]bool{}
	pins, _ := datapath.DumpPins(bpffs) // without pins nothing on the uplink is ours
	for _, p := range pins {
		pinned[p.ID] = pinned[p.ID] || p.Kind == "link"
	}
	var before, after []string
	running := false
	for _, attachPoint := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		chain, err := datapath.Chain(uplink, attachPoint)
		if err != nil && rights.State != OK { // the kernel returns the same error as if it could not list any
			return fail("see privileges", "not tried")
		}
		if err != nil {
			return fail("use Linux 6.12 or newer", "the programs of %s cannot be listed (tcx): %v", name, err)
		}
		own := slices.IndexFunc(
			chain.Programs,
			func(p datapath.HookedProgram) bool { return strings.HasPrefix(p.Name, ours) },
		)
		if own >= 0 && !pinned[chain.Programs[own].Link] {
			return fail(
				"use the --bpffs and --state-dir that agent was started with, or take it apart with 'pilaster node "+
					"reset'",
				"%s carries the packet path of another agent, whose pins are not in %s",
				name,
				bpffs,
			)
		}
		for i, p := range chain.Programs {
			switch {
			case own < 0:
				after = append(after, p.Name)
			case i < own:
				before = append(before, p.Name)
			}
		}
		running = running || own >= 0
	}
	switch {
	case len(before) > 0:
		return warn("attach them after ours", "before our programs on %s stand %s", name, strings.Join(before, ", "))
	case len(after) > 0:
		return warn(
			"nothing, if they need not; the agent's log and 'pilaster status' tell when one goes first later",
			"%s on %s will see no packet from the fabric to a container: the agent goes first",
			strings.Join(after, ", "),
			name,
		)
	}
	if running {
		return ok("an agent's are on %s, first in the chain", name)
	}
	return ok("none on %s", name)
}

// otherInterfaces names those that the agent is going to guard. That something there has the private prefix, which
// would be cut off, the check of that prefix says.
func otherInterfaces(uplink netlink.Link) Result {
	edge, err := hook.HostInterfaces(&netlink.Handle{}, uplink)
	if err != nil {
		return unknown(err)
	}
	if len(edge) == 0 {
		return ok("none beside %s leads to this machine", uplink.Attrs().Name)
	}
	names := make([]string, len(edge))
	for i, l := range edge {
		names[i] = l.Attrs().Name
	}
	return ok(
		"the agent guards %s: packets that pose as containers or as this node end there, all others pass",
		strings.Join(names, ", "),
	)
}

// routesToNodes are those to the last node there can be.
func routesToNodes(plan address.Plan) ([]netlink.Route, error) {
	other := plan.Node(plan.Nodes() - 1).Addr().Next()
	return netns.List(func() ([]netlink.Route, error) { return netlink.RouteGet(other.AsSlice()) })
}

// wayToNodes asks where packets to a node would leave. Routes may come later, so nothing fails here.
func wayToNodes(uplink netlink.Link, plan address.Plan) Result {
	name := uplink.Attrs().Name
	routes, err := routesToNodes(plan)
	if err != nil || len(routes) == 0 {
		return warn(
			fmt.Sprintf("give %s a default route or one for %v", name, plan.Base),
			"no route leads to other nodes in %v",
			plan.Base,
		)
	}
	if out := routes[0].LinkIndex; out != uplink.Attrs().Index {
		return warn(fmt.Sprintf("route %v by %s; containers' packets leave by no other device", plan.Base, name),
			"packets to nodes in %v leave by %s", plan.Base, deviceName(out))
	}
	return ok("packets to nodes in %v leave by %s", plan.Base, name)
}

func deviceName(index int) string {
	if l, err := netlink.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprint("device ", index)
}

// routerAdvertisements looks for a default route that ends with its lifetime, because the device
// forwards and the kernel then accepts advertisements only if it is configured to.
func routerAdvertisements() Result {
	routes, err := netns.List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, unix.AF_INET6) })
	if err != nil {
		return unknown(err)
	}
	var learnt []string
	for _, r := range routes {
		if r.Protocol != unix.RTPROT_RA || r.Dst != nil && !isDefault(r.Dst) {
			continue
		}
		dev := deviceName(r.LinkIndex)
		if ipv6(dev, "forwarding") != "0" && ipv6(dev, "accept_ra") == "1" {
			return fail(
				"sysctl -w net.ipv6.conf."+dev+".accept_ra=2",
				"the default route on %s is learnt from router advertisements, which a device that forwards "+
					"ignores: it will end",
				dev,
			)
		}
		learnt = append(learnt, dev)
	}
	if len(learnt) == 0 {
		return ok("no default route is learnt from them")
	}
	return ok(
		"the default route learnt on %s stays: the agent sets forwarding on its own devices only",
		strings.Join(learnt, ", "),
	)
}

func isDefault(n *net.IPNet) bool {
	ones, _ := n.Mask.Size()
	return ones == 0
}

// ipv6 is a setting of a device; "" where it cannot be read.
func ipv6(dev, name string) string {
	b, _ := os.ReadFile(filepath.Join("/proc/sys/net/ipv6/conf", dev, name))
	return strings.TrimSpace(string(b))
}

func privatePrefix(plan address.Plan) Result {
	if err := hostnet.CheckPrivate(plan.Private); err != nil {
		return failed(err, "")
	}
	return free(plan.Private)
}

func basePrefix(plan address.Plan, uplink string) Result {
	if err := hostnet.CheckBase(plan.Base, uplink); err != nil {
		return failed(err, "")
	}
	return free(plan.Base)
}

func free(p netip.Prefix) Result {
	return ok("no address and no route of this machine is in the way of %v", p)
}
