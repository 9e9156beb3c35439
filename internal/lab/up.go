package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/humanize"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// downTime bounds the clean-up after a failed Up.
const downTime = time.Minute

// Up brings a lab up. Nodes and containers start in the order of the spec, so their numbers are in that order too. If
// Up fails, or ctx ends before Up is done, Up removes everything that it has created.
func Up(ctx context.Context, spec Spec, o Options) (*Lab, error) {
	if err := spec.Validate(); err != nil {
		return nil, fmt.Errorf("lab %s: %w", spec.Name, err)
	}
	// Check here that the kernel has the needed features. Without this check, each agent would report later that they
	// are missing. The uplinks are veth pairs, which support every kind of device.
	kind, _ := device.ChooseDevice(spec.Device)
	if err := device.CheckDeviceUplink(kind, &netlink.Veth{}); err != nil {
		return nil, fmt.Errorf("lab %s: %w", spec.Name, err)
	}
	binary, err := filepath.Abs(o.Binary)
	if err != nil {
		return nil, err
	}
	for _, needed := range []string{binary, filepath.Join(filepath.Dir(binary), cniPlugin)} {
		if _, err := os.Stat(needed); err != nil {
			return nil, fmt.Errorf("lab %s: %w; build it with: make build", spec.Name, err)
		}
	}
	root := cmp.Or(o.Root, DefaultRoot)
	f := folder(filepath.Join(root, spec.Name))
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(string(f), 0o755); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil, fmt.Errorf(
				"lab %s is already up, or remains after a crash; nothing was changed; "+
					"remove it with: pilaster lab down %s",
				spec.Name,
				spec.Name,
			)
		}
		return nil, err
	}
	progress := o.Progress
	if progress == nil {
		progress = func(string) {}
	}
	l := newLab(f)
	l.state = state{
		Spec: spec, Binary: binary, OrchestratorArgs: o.OrchestratorArgs, AgentArgs: o.AgentArgs,
		WithoutCgroups: o.WithoutCgroups,
	}
	if err := l.up(ctx, o.External, progress); err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTime)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("lab %s: %w", spec.Name, err), Down(cleanup, root, spec.Name))
	}
	return l, nil
}

func (l *Lab) up(ctx context.Context, external *ExternalOrchestrator, progress func(string)) error {
	spec := l.state.Spec
	for _, dir := range []string{"netns", "log", "nodes", "orchestrator", "bpf", "cgroup", "hosts"} {
		if err := os.Mkdir(l.folder.path(dir), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("bpf", l.folder.bpf(), "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w", l.folder.bpf(), err)
	}

	regions, nodes := spec.regions(), spec.AllNodes()
	if err := l.createCgroups(nodes); err != nil {
		return err
	}
	progress(fmt.Sprintf("fabric of %d links", len(nodes)+len(regions)+len(spec.Outside)))
	if err := l.createFabric(ctx); err != nil {
		return err
	}

	progress(humanize.Of(len(regions), "orchestrator", "orchestrators"))
	if err := startSupervisor(ctx, l.folder, l.state.Binary); err != nil {
		return err
	}
	for i, r := range regions {
		if external != nil {
			if err := l.useExternal(external); err != nil {
				return err
			}
		} else if _, err := l.control.start(ctx, l.orchestratorProcess(r, i)); err != nil {
			return err
		}
		for _, t := range spec.Tenants {
			if err := l.createTenant(ctx, r.Name, t); err != nil {
				return err
			}
		}
	}

	progress(humanize.Of(len(nodes), "agent", "agents"))
	for _, node := range nodes {
		if spec.needsOVS(node) {
			if _, err := l.control.start(ctx, l.ovsProcess(node)); err != nil {
				return err
			}
		}
		if _, err := l.control.start(ctx, l.agentProcess(node)); err != nil {
			return err
		}
	}
	if err := l.routeNodes(ctx); err != nil {
		return err
	}
	if err := l.joinRegions(ctx); err != nil {
		return err
	}
	if err := l.letOut(ctx); err != nil {
		return err
	}

	progress(humanize.Of(len(spec.Containers), "container", "containers"))
	for _, c := range spec.Containers {
		if err := l.AddContainer(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// useExternal makes an external orchestrator serve on the address that the lab's own orchestrator would have. It links
// the external orchestrator's socket and token into the lab's folder.
func (l *Lab) useExternal(by *ExternalOrchestrator) error {
	ns, err := l.Namespace(Orchestrator)
	if err != nil {
		return err
	}
	defer ns.Close()
	var nodes net.Listener
	if err := ns.Do(func() (err error) {
		nodes, err = net.Listen("tcp", orchestratorListen(0))
		return err
	}); err != nil {
		return err
	}
	by.Serve(nodes)
	for from, to := range map[string]string{l.folder.orchestratorSocket(""): by.Socket, l.folder.token(""): by.Token} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(from), 0o755), os.Symlink(to, from)); err != nil {
			return err
		}
	}
	return nil
}

func (l *Lab) createFabric(ctx context.Context) error {
	if err := createRouter(l.folder); err != nil {
		return err
	}
	r, err := openFabric(l.folder)
	if err != nil {
		return err
	}
	defer r.close()
	var names []string
	for _, r := range l.state.Spec.regions() {
		names = append(names, r.place())
	}
	names = append(names, l.state.Spec.AllNodes()...)
	addresses := map[string]netip.Addr{}
	for link, name := range names {
		addresses[name] = farSide(link)
	}
	for _, h := range l.state.Spec.outsideHosts() {
		names, addresses[h.Name] = append(names, h.Name), h.Address
	}
	for link, name := range names {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := r.connect(l.folder, name, link, addresses[name]); err != nil {
			return err
		}
	}
	for _, name := range names {
		if err := l.waitUplink(ctx, name, r.router); err != nil {
			return err
		}
	}
	if l.state.Spec.Uplinks < 2 {
		return nil
	}
	for _, node := range l.state.Spec.AllNodes() {
		if err := l.connectSecond(ctx, r, node, slices.Index(names, node)); err != nil {
			return err
		}
	}
	return nil
}

// waitUplink waits until packets pass a link in both directions.
func (l *Lab) waitUplink(ctx context.Context, name string, router *netns.Namespace) error {
	ns, err := l.Namespace(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	return errors.Join(ns.WaitUp(ctx, Uplink), router.WaitUp(ctx, name))
}

const orchestratorPort = 7070

// orchestratorListen returns the address on which the orchestrator of a region, by its number, serves nodes.
func orchestratorListen(region int) string {
	return netip.AddrPortFrom(farSide(region), orchestratorPort).String()
}

func (l *Lab) orchestratorProcess(r Region, number int) Process {
	arguments := l.state.OrchestratorArgs
	if egress := l.state.Spec.EgressPrefix; egress.IsValid() {
		arguments = append([]string{"--egress-prefix", egress.String()}, arguments...)
	}
	if r.Name != "" {
		arguments = append([]string{"--region", r.Name, "--base-prefix", r.BasePrefix.String()}, arguments...)
	}
	return Process{
		Name: r.place(), Netns: l.folder.netns(r.place()), Log: l.folder.log(r.place()),
		Argv: append([]string{
			l.state.Binary, "orchestrator", "--listen", orchestratorListen(number),
			"--data-dir", l.folder.orchestratorData(r.Name), "--run-dir", l.folder.orchestratorRun(r.Name),
		}, arguments...),
	}
}

// createCgroups makes a cgroup for each node, in which processes of the node and of its containers run.
func (l *Lab) createCgroups(nodes []string) error {
	if err := unix.Mount("none", l.folder.cgroups(), "cgroup2", 0, ""); err != nil {
		return fmt.Errorf("mount cgroup2 on %s: %w; the kernel needs CONFIG_CGROUP_BPF", l.folder.cgroups(), err)
	}
	for _, node := range nodes {
		if err := os.MkdirAll(l.folder.cgroup(node), 0o755); err != nil {
			return fmt.Errorf("cgroup of node %s: %w", node, err)
		}
	}
	return nil
}

func (l *Lab) agentProcess(node string) Process {
	arguments := l.state.AgentArgs
	if l.state.Spec.Device != "" {
		arguments = append([]string{"--device", l.state.Spec.Device}, arguments...)
	}
	if reserve := l.state.Spec.MTUReserve; reserve > 0 {
		arguments = append([]string{"--mtu-reserve", strconv.Itoa(reserve)}, arguments...)
	}
	if l.state.Spec.Uplinks > 1 {
		arguments = append([]string{"--uplink", SecondUplink}, arguments...)
	}
	if !l.state.WithoutCgroups {
		arguments = append([]string{"--cgroup-root", l.folder.cgroup(node)}, arguments...)
	}
	if rack := l.state.Spec.Racks[node]; rack != "" {
		arguments = append([]string{"--rack", rack}, arguments...)
	}
	region, number, _ := l.state.Spec.at(func(r Region) bool { return slices.Contains(r.all(), node) })
	if region.Edge == node {
		arguments = append([]string{"--edge"}, arguments...)
	}
	arguments = append(l.state.Spec.networkArguments(node, l.OVS(node)), arguments...)
	return Process{
		Name: AgentProcess(node), Netns: l.folder.netns(node), Log: l.folder.log(AgentProcess(node)),
		Argv: append([]string{
			l.state.Binary, "agent", "--orchestrator", "https://" + orchestratorListen(number), "--token-file",
			l.folder.token(region.Name),
			"--uplink", Uplink, "--node-name", node, "--run-dir", l.folder.nodeRun(node),
			"--state-dir", l.folder.nodeState(node), "--bpffs", l.folder.nodeBPF(node),
		}, arguments...),
	}
}

func (l *Lab) ovsProcess(node string) Process {
	return Process{
		Name: OVSProcess(node), Netns: l.folder.netns(node), Log: l.folder.log(OVSProcess(node)),
		Argv: []string{l.state.Binary, "lab", "ovs", l.OVS(node)},
	}
}

func (l *Lab) createTenant(ctx context.Context, region string, t Tenant) error {
	if !t.in(region) {
		return nil
	}
	request := &pilasterv1.CreateTenantRequest{Name: t.Name, Network: t.Network}
	switch {
	case tenant.NetworkHas(t.Network, tenant.OwnCIDRs):
	case t.Addressing == tenant.Clear:
		request.Addressing = pilasterv1.Addressing_ADDRESSING_CLEAR
	case t.Addressing == tenant.Encrypted:
		request.Addressing = pilasterv1.Addressing_ADDRESSING_ENCRYPTED
	} // the default is the network's
	for _, o := range t.overlays(region) {
		request.Overlays = append(
			request.Overlays,
			&pilasterv1.Overlay{Cidr: o.CIDR.String(), NodeBits: uint32(o.NodeBits)},
		)
	}
	if _, err := l.OperatorOf(region).CreateTenant(ctx, connect.NewRequest(request)); err != nil {
		return fmt.Errorf("create tenant %s: %w", t.Name, err)
	}
	return nil
}

// egressOf returns the /64 of a node for egress addresses, if it is not the node's own; false if it has none.
func (l *Lab) egressOf(node string, prefix netip.Prefix) (netip.Prefix, bool) {
	region, _ := l.state.Spec.RegionOf(node)
	egress, ok := l.state.Spec.plan(region).EgressNode(prefix)
	return egress, ok && egress != prefix
}

// locator returns the locator of a node; false if it has none.
func (l *Lab) locator(node string, prefix netip.Prefix) (netip.Prefix, bool) {
	region, _ := l.state.Spec.RegionOf(node)
	ila, err := region.plan().ILA()
	if err != nil {
		return netip.Prefix{}, false
	}
	locator, err := ila.Locator(prefix)
	return locator, err == nil
}

// routeTunnel adds the routes of a node's IPv4 tunnel address, if it has one. The fabric's links have IPv6 addresses
// only, which are the next hops (RFC 5549).
func (l *Lab) routeTunnel(r *fabric, node string, prefix netip.Prefix, via netip.Addr) error {
	if !l.state.Spec.hasTunnels4(node) {
		return nil
	}
	region, _ := l.state.Spec.RegionOf(node)
	pool := l.state.Spec.Pool.Prefix()
	vtep, ok := address.VTEP4(pool, region.plan().NodeNumber(prefix))
	if !ok {
		return fmt.Errorf("node %s: %v has no tunnel address for it", node, pool)
	}
	if err := r.route4(node, netip.PrefixFrom(vtep, 32), via); err != nil {
		return err
	}
	ns, err := l.Namespace(node)
	if err != nil {
		return err
	}
	defer ns.Close()
	inside, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer inside.Close()
	return route4(inside, Uplink, pool, routerOf(via))
}

// routePrefixes adds the routes to a node's prefixes to the fabric. With two uplinks, that of the egress addresses is
// by the second, and both may send with all of the node's addresses.
func (l *Lab) routePrefixes(r *fabric, node string, prefix netip.Prefix, via netip.Addr) error {
	number, second := l.state.Spec.secondLink(node)
	first := []netip.Prefix{prefix}
	if locator, ok := l.locator(node, prefix); ok {
		first = append(first, locator)
	}
	egress, has := l.egressOf(node, prefix)
	if has && l.state.Spec.Uplinks < 2 {
		first = append(first, egress)
	}
	for _, p := range first {
		if err := r.route(node, p, via); err != nil {
			return err
		}
		if l.state.Spec.Uplinks > 1 {
			if err := errors.Join(r.allowSource(second, p), r.reportNoRoute(second, p)); err != nil {
				return err
			}
		}
	}
	if has && l.state.Spec.Uplinks > 1 {
		return errors.Join(r.route(second, egress, farSide(number)), r.allowSource(node, egress))
	}
	return nil
}

// routeContainers adds the route by which processes of a node reach containers of other nodes, with the node's address
// as their source. By the default route they would have that of the uplink, at which no container knows a node.
func (l *Lab) routeContainers(node string, prefix netip.Prefix, via netip.Addr) error {
	ns, err := l.Namespace(node)
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return err
	}
	defer h.Close()
	region, _ := l.state.Spec.RegionOf(node)
	base := l.state.Spec.plan(region).Base
	err = netns.Retry(func() error {
		return h.RouteReplace(&netlink.Route{
			Dst: ipNet(base), Gw: routerOf(via).AsSlice(), Src: tenant.NodeAddress(prefix).AsSlice(),
		})
	})
	if err != nil {
		return fmt.Errorf("route of node %s to %v: %w", node, base, err)
	}
	return nil
}

// routeNodes adds the nodes' routes, as the orchestrators list them, to the fabric.
func (l *Lab) routeNodes(ctx context.Context) error {
	var nodes []*pilasterv1.Node
	for _, region := range l.state.Spec.regions() {
		response, err := l.OperatorOf(region.Name).ListNodes(ctx, connect.NewRequest(&pilasterv1.ListNodesRequest{}))
		if err != nil {
			return fmt.Errorf("list nodes: %w", err)
		}
		nodes = append(nodes, response.Msg.Nodes...)
	}
	prefixes := map[string]netip.Prefix{}
	r, err := openFabric(l.folder)
	if err != nil {
		return err
	}
	defer r.close()
	for _, n := range nodes {
		prefix, err := netip.ParsePrefix(n.Prefix)
		if err != nil || len(n.UplinkAddresses) == 0 {
			return fmt.Errorf(
				"node %s: no route from prefix %q and uplink addresses %q",
				n.Name,
				n.Prefix,
				n.UplinkAddresses,
			)
		}
		via, err := netip.ParseAddr(n.UplinkAddresses[0])
		if err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
		if err := l.routePrefixes(r, n.Name, prefix, via); err != nil {
			return err
		}
		if err := l.routeTunnel(r, n.Name, prefix, via); err != nil {
			return err
		}
		if slices.ContainsFunc(l.state.Spec.Tenants, func(t Tenant) bool { return t.Nodes != "" }) {
			if err := l.routeContainers(n.Name, prefix, via); err != nil {
				return err
			}
		}
		prefixes[n.Name] = prefix
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Nodes = nil
	for _, name := range l.state.Spec.AllNodes() {
		if !prefixes[name].IsValid() {
			return fmt.Errorf("the orchestrator does not list node %s although its agent is ready", name)
		}
		l.state.Nodes = append(l.state.Nodes, nodeState{name, prefixes[name]})
	}
	return l.save()
}
