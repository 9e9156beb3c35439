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
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// findUplink returns nil if the device does not exist.
func findUplink(name string) (netlink.Link, Result) {
	uplink, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fail("name the device to the fabric with --uplink", "uplink %s: %v", name, err)
	}
	if uplink.Attrs().Flags&net.FlagUp == 0 || uplink.Attrs().OperState == netlink.OperDown {
		return uplink, fail("set it up: ip link set "+name+" up; check its cable or peer", "%s is down", name)
	}
	if hook.IsOurs(uplink) {
		return uplink, fail("name the device to the fabric with --uplink", "%s is a device of Pilaster", name)
	}
	if kind := uplink.Attrs().EncapType; kind != datapath.UplinkKind {
		return uplink, fail("name an Ethernet device with --uplink", "%s is not an Ethernet device (%s)", name, kind)
	}
	if ipv6(name, "disable_ipv6") != "0" {
		return uplink, fail("sysctl -w net.ipv6.conf."+name+".disable_ipv6=0", "IPv6 is disabled on %s", name)
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
			"add an IPv6 address, at least a link-local one: it is the fabric's next hop",
			"%s has no permanent IPv6 address",
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
	if i := slices.IndexFunc(there, needsHostDevice); i >= 0 && kind == endpoint.Macvlan {
		return fail(
			"use --device veth, or move the tenants to network "+tenant.NetworksWithout(tenant.HostDevices)+" first",
			"endpoint %d is on network %s, which an agent with --device macvlan does not support",
			there[i].ID,
			tenant.NetworksWith(tenant.HostDevices),
		)
	}
	if why != "" {
		why = ": " + why
	}
	other := changes(uplink, kind)
	if kind == endpoint.Macvlan {
		return warn(
			"use veth if a container has CAP_NET_ADMIN: with a macvlan, it could receive the node's packets "+
				"(docs/howto/devices.md)",
			"containers get macvlans on %s%s",
			uplink.Attrs().Name,
			other,
		)
	}
	return ok("containers get %s devices%s%s", kind, why, other)
}

func needsHostDevice(r endpoint.Record) bool {
	return slices.ContainsFunc(r.Networks(), func(n string) bool { return tenant.NetworkHas(n, tenant.HostDevices) })
}

// changes reports whether an agent runs here with another kind of device.
func changes(uplink netlink.Link, kind string) string {
	chain, err := datapath.Chain(uplink, ebpf.AttachTCXIngress)
	if err != nil { // otherPrograms reports it
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
		return "; the agent on this node has --device macvlan, and can be restarted with this one"
	}
	return "; the agent on this node has another --device, and can be restarted with this one: existing containers " +
		"keep their devices"
}

func mtu(uplink netlink.Link, reserve int) Result {
	const (
		least    = 1280 // RFC 8200 §5
		ethernet = 1500
	)
	left := uplink.Attrs().MTU - reserve
	if left < least {
		return fail(
			"increase the MTU, or decrease --mtu-reserve",
			"%s has an MTU of %d; less the reserve of %d, that is below IPv6's minimum of %d",
			uplink.Attrs().Name,
			uplink.Attrs().MTU,
			reserve,
			least,
		)
	}
	name := uplink.Attrs().Name
	// A router may announce a smaller MTU than the device's (RFC 4861 §4.6.4); the kernel stores both.
	if announced, err := strconv.Atoi(ipv6(name, "mtu")); err == nil && announced < uplink.Attrs().MTU {
		return warn(
			fmt.Sprintf(
				"ip link set %s mtu %d, or give the agent --mtu-reserve %d",
				name,
				announced,
				uplink.Attrs().MTU-announced+reserve,
			),
			"containers get an MTU of %d, but the router of %s announces %d: larger packets are lost",
			left,
			name,
			announced,
		)
	}
	if left > ethernet {
		return todo(
			fmt.Sprintf("ping each other node with: ping -M do -s %d, and run 'pilaster preflight' there", left-48),
			"containers get an MTU of %d; not checked: whether all nodes and the fabric support it",
			left,
		)
	}
	return ok("containers get an MTU of %d by %s", left, name)
}

// Prefixes of the names of the agent's programs on the uplink. Programs with the prefix guard follow those with the
// prefix ours if containers have macvlans.
const (
	ours  = "pil_uplink_"
	guard = "pil_guard_"
)

// otherPrograms reports other programs that receive packets. The agent's programs must be first in the tcx chain. XDP
// programs run before the chain.
func otherPrograms(uplink netlink.Link, bpffs string, rights Result) Result {
	name := uplink.Attrs().Name
	if xdp := uplink.Attrs().Xdp; xdp != nil && xdp.Attached {
		return warn(
			"make sure that it passes IPv6 packets",
			"an XDP program (id %d) on %s receives containers' packets before the agent's programs",
			xdp.ProgId,
			name,
		)
	}
	pinned := map[uint32]bool{}
	pins, _ := datapath.DumpPins(bpffs) // without pins, no program on the uplink is the agent's
	for _, p := range pins {
		pinned[p.ID] = pinned[p.ID] || p.Kind == "link"
	}
	var before, after []string
	running := false
	for _, attachPoint := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		chain, err := datapath.Chain(uplink, attachPoint)
		if err != nil && rights.State != OK { // the kernel returns the same error as one without this feature
			return fail("see privileges", "not tested")
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
				"use the --bpffs and --state-dir of that agent, or remove it with 'pilaster node reset'",
				"%s has the packet path of another agent, whose pins are not in %s",
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
		return warn("attach them after the agent's", "programs on %s before the agent's: %s", name,
			strings.Join(before, ", "))
	case len(after) > 0:
		return warn(
			"nothing, if they do not need them; the agent's log and 'pilaster status' report if one is first later",
			"%s on %s will receive no packets from the fabric to containers: the agent's programs run first",
			strings.Join(after, ", "),
			name,
		)
	}
	if running {
		return ok("an agent's programs are first in the chain on %s", name)
	}
	return ok("no other programs on %s", name)
}

// otherInterfaces lists the interfaces that the agent will guard. The check of the private prefix, and not this one,
// reports an interface with addresses in that prefix.
func otherInterfaces(uplinks []netlink.Link) Result {
	edge, err := hook.HostInterfaces(&netlink.Handle{}, uplinks...)
	if err != nil {
		return unknown(err)
	}
	if len(edge) == 0 {
		return ok("no other interface than %s receives packets for this machine", namesOf(uplinks))
	}
	return ok(
		"the agent will drop packets with addresses of containers or of this node on %s, and pass all others",
		namesOf(edge),
	)
}

func namesOf(links []netlink.Link) string {
	names := make([]string, len(links))
	for i, l := range links {
		names[i] = l.Attrs().Name
	}
	return strings.Join(names, ", ")
}

// lastNode is the address of the last possible node, which stands for all others.
func lastNode(plan address.Plan) netip.Addr { return plan.Node(plan.Nodes() - 1).Addr().Next() }

// hostOutside stands for all hosts outside: no more specific route than the default one is likely to have it.
var hostOutside = netip.MustParseAddr("3fff::1") // RFC 9637

// way returns this machine's route to an address, and the uplink by which it leads: nil if it is none of them.
func way(uplinks []netlink.Link, to netip.Addr) (*netlink.Route, netlink.Link) {
	routes, err := netns.List(func() ([]netlink.Route, error) { return netlink.RouteGet(to.AsSlice()) })
	if err != nil || len(routes) == 0 {
		return nil, nil
	}
	i := slices.IndexFunc(uplinks, func(l netlink.Link) bool { return l.Attrs().Index == routes[0].LinkIndex })
	if i < 0 {
		return &routes[0], nil
	}
	return &routes[0], uplinks[i]
}

// wayToNodes checks that the routes to other nodes use an uplink, and returns it, else the first. It only warns,
// because routes may be added later.
func wayToNodes(uplinks []netlink.Link, plan address.Plan) (Result, netlink.Link) {
	name := uplinks[0].Attrs().Name
	switch route, uplink := way(uplinks, lastNode(plan)); {
	case route == nil:
		return warn(
			fmt.Sprintf("add a default route by %s, or one for %v", name, plan.Base),
			"there is no route to other nodes in %v",
			plan.Base,
		), uplinks[0]
	case uplink == nil:
		return warn(fmt.Sprintf("route %v by %s: containers' packets leave only by an uplink", plan.Base, name),
			"packets to nodes in %v leave by %s", plan.Base, deviceName(route.LinkIndex)), uplinks[0]
	case uplink != uplinks[0]:
		return warn("name it first: 'pilaster node list' shows the fabric the address of the first uplink",
			"packets to nodes in %v leave by %s, which is not the first uplink", plan.Base, uplink.Attrs().Name), uplink
	default:
		return ok("packets to nodes in %v leave by %s", plan.Base, uplink.Attrs().Name), uplink
	}
}

// wayOutside checks that the default route is by an uplink. Without one no container reaches hosts outside, which need
// not be a fault.
func wayOutside(uplinks []netlink.Link) Result {
	switch route, uplink := way(uplinks, hostOutside); {
	case route == nil:
		return ok("there is no default route: containers reach hosts outside only by other routes, if any")
	case uplink == nil:
		return warn(fmt.Sprintf("give --uplink %s too if containers are to reach hosts outside",
			deviceName(route.LinkIndex)), "the default route is by %s: packets of containers leave only by an uplink",
			deviceName(route.LinkIndex))
	default:
		return ok("packets to hosts outside leave by %s", uplink.Attrs().Name)
	}
}

func deviceName(index int) string {
	if l, err := netlink.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprint("device ", index)
}

// routerAdvertisements looks for a default route from a router advertisement that will expire, because the kernel
// accepts no further advertisements: on a device that forwards, it accepts them only with accept_ra=2.
func routerAdvertisements() Result {
	routes, err := netns.List(func() ([]netlink.Route, error) { return netlink.RouteList(nil, unix.AF_INET6) })
	if err != nil {
		return unknown(err)
	}
	var learned []string
	for _, r := range routes {
		if r.Protocol != unix.RTPROT_RA || r.Dst != nil && !isDefault(r.Dst) {
			continue
		}
		dev := deviceName(r.LinkIndex)
		if ipv6(dev, "forwarding") != "0" && ipv6(dev, "accept_ra") == "1" {
			return fail(
				"sysctl -w net.ipv6.conf."+dev+".accept_ra=2",
				"the default route on %s comes from router advertisements, which a device that forwards ignores: "+
					"the route will expire",
				dev,
			)
		}
		learned = append(learned, dev)
	}
	if len(learned) == 0 {
		return ok("no default route comes from router advertisements")
	}
	return ok(
		"the default route from router advertisements on %s stays: the agent sets forwarding only on its own devices",
		strings.Join(learned, ", "),
	)
}

func isDefault(n *net.IPNet) bool {
	ones, _ := n.Mask.Size()
	return ones == 0
}

// ipv6 reads an IPv6 setting of a device; "" if it cannot be read.
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

func basePrefix(plan address.Plan, uplinks []string) Result {
	if err := hostnet.CheckBase(plan.Base, uplinks, modules.OnFabric); err != nil {
		return failed(err, "")
	}
	return free(plan.Base)
}

func egressPrefix(plan address.Plan, uplinks []string) Result {
	if err := hostnet.CheckEgress(plan.Egress, uplinks); err != nil {
		return failed(err, "")
	}
	return free(plan.Egress)
}

func free(p netip.Prefix) Result {
	return ok("no address or route of this machine overlaps %v", p)
}
