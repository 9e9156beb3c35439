package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"connectrpc.com/connect"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// Moved is what Move did.
type Moved struct {
	Container string     `json:"container"`
	From      string     `json:"from"`
	To        string     `json:"to"`
	Address   netip.Addr `json:"address"`
	Sessions  int        `json:"sessions"` // copied before the new device existed
	Later     int        `json:"later"`    // sessions at the end, when the new ones were copied
	Left      int        `json:"left"`     // sessions for which the new node had no room

	// from the first change until the new node's agent has the address; from then until the former node has removed its
	// device; and all
	Attach time.Duration `json:"attachNs"`
	Remove time.Duration `json:"removeNs"`
	Total  time.Duration `json:"totalNs"`
}

// formerInterface is the name of a container's device to the node that it leaves.
const formerInterface = Interface + "-former"

// movedTimeout is how long Move waits until the former node knows that the container has moved. If it does not, the
// former node's device is removed nevertheless.
const movedTimeout = 5 * time.Second

// Move moves a container to another node. Its namespace stays, with processes and open connections. The new node's
// agent attaches a second device with the same address, the container's routes change to it, and then the former node's
// agent removes its own, so packets are lost neither way. Before and after, the sessions of the container's connections
// under policies are copied. After an error the container is on the node that its status shows.
func (l *Lab) Move(ctx context.Context, name, to string) (m Moved, err error) {
	c, err := l.Container(name)
	if err != nil {
		return m, err
	}
	if err := l.checkMove(c, to); err != nil {
		return m, err
	}
	m = Moved{Container: name, From: c.Node, To: to, Address: c.Address}
	if m.Sessions, _, err = l.copySessions(ctx, c, to); err != nil {
		return m, fmt.Errorf("container %s: copy its sessions to %s: %w; it stays on %s", name, to, err, c.Node)
	}
	began := time.Now()
	moved := c
	moved.Node = to
	former, err := l.attachSecond(ctx, &moved)
	if err != nil {
		return m, fmt.Errorf("container %s: attach it to %s: %w; it stays on %s", name, to, err, c.Node)
	}
	defer former.close()
	m.Attach = time.Since(began)
	if err := l.replace(moved); err != nil {
		return m, err
	}
	l.awaitMoved(ctx, c)
	attached := time.Now()
	if m.Later, m.Left, err = l.copySessions(ctx, c, to); err != nil {
		return m, fmt.Errorf("container %s is on %s; copying the sessions that it began meanwhile failed: %w", name, to,
			err)
	}
	if err := former.leave(); err != nil {
		return m, fmt.Errorf("container %s is on %s; removing its routes to %s failed: %w", name, to, c.Node, err)
	}
	request := &pilasterv1.DeleteEndpointRequest{ContainerId: l.ContainerID(name), Interface: Interface}
	if _, err := l.Agent(c.Node).DeleteEndpoint(ctx, connect.NewRequest(request)); err != nil {
		return m, fmt.Errorf("container %s is on %s; removing its device to %s failed: %w", name, to, c.Node, err)
	}
	m.Remove, m.Total = time.Since(attached), time.Since(began)
	return m, nil
}

// checkMove refuses a container that cannot move to a node.
func (l *Lab) checkMove(c ContainerStatus, to string) error {
	region, known := l.state.Spec.RegionOf(to)
	network := tenant.Tenant{Network: l.tenant(c.Tenant).Network}.OnNetwork()
	switch here, _ := l.state.Spec.RegionOf(c.Node); {
	case !tenant.NetworkHas(network, tenant.AddressKeys):
		return fmt.Errorf("container %s: tenant %s is on network %s, where an address stays on its node. Nothing was "+
			"changed; containers of network %s can move", c.Name, c.Tenant, network,
			tenant.NetworksWith(tenant.AddressKeys))
	case c.AddressKey == "":
		return fmt.Errorf("container %s has no address key, so another node would give it another address; nothing "+
			"was changed: set addressKey in the lab's file", c.Name)
	case !known || region.Edge == to:
		return fmt.Errorf("lab %s has no node %q for containers; nothing was changed: pilaster lab status lists the "+
			"nodes", l.Name(), to)
	case here.Name != region.Name:
		return fmt.Errorf("node %s is in another region than container %s; nothing was changed", to, c.Name)
	case c.Node == to:
		return fmt.Errorf("container %s is on %s already; nothing was changed", c.Name, to)
	}
	return nil
}

// copySessions copies the sessions of a container to another node's agent. It returns how many there are, and for how
// many that node has no room.
func (l *Lab) copySessions(ctx context.Context, c ContainerStatus, to string) (all, left int, err error) {
	id := l.ContainerID(c.Name)
	has, err := l.Agent(c.Node).ExportSessions(ctx, connect.NewRequest(&pilasterv1.ExportSessionsRequest{Key: id}))
	if err != nil {
		return 0, 0, err
	}
	request := &pilasterv1.ImportSessionsRequest{ContainerId: id, Interface: Interface, Sessions: has.Msg.Sessions}
	resp, err := l.Agent(to).ImportSessions(ctx, connect.NewRequest(request))
	if err != nil {
		return 0, 0, err
	}
	return len(has.Msg.Sessions), int(resp.Msg.Left), nil
}

// attachSecond attaches a container to its new node, while its device to the former one keeps working. If it fails, the
// container is as before.
func (l *Lab) attachSecond(ctx context.Context, c *ContainerStatus) (*formerDevice, error) {
	was := c.Address
	former, err := l.setAside(c.Name)
	if err == nil {
		err = l.addTo(ctx, c)
	}
	if err == nil && c.Address != was {
		err = fmt.Errorf("the agent gave it %v, not %v", c.Address, was)
	}
	if err != nil && former != nil {
		err = errors.Join(err, former.restore())
		former.close()
	}
	return former, err
}

// formerDevice is a container's device to the node that it leaves. The new device gets the same routes, of which this
// one has the halves: they are preferred until it leaves.
type formerDevice struct {
	*netlink.Handle
	device         netlink.Link
	renamed        bool
	routes, halves []netlink.Route // removed and added
}

func (d *formerDevice) close() { d.Handle.Close() }

// setAside renames a container's device, and divides its routes into halves. After an error the result, if any, has to
// be restored.
func (l *Lab) setAside(name string) (*formerDevice, error) {
	ns, err := l.Namespace(name)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	h, err := ns.Netlink()
	if err != nil {
		return nil, err
	}
	d := &formerDevice{Handle: h}
	if d.device, err = h.LinkByName(Interface); err != nil {
		return d, fmt.Errorf("device %s: %w", Interface, err)
	}
	all, err := netns.List(func() ([]netlink.Route, error) { return h.RouteList(d.device, netlink.FAMILY_ALL) })
	if err != nil {
		return d, fmt.Errorf("routes of %s: %w", Interface, err)
	}
	for _, r := range all {
		if r.Dst == nil || r.Gw == nil {
			continue
		}
		if err := d.halve(netlink.Route{
			LinkIndex: r.LinkIndex, Dst: r.Dst, Gw: r.Gw, Src: r.Src, Protocol: r.Protocol,
			Flags: int(netlink.FLAG_ONLINK), Priority: r.Priority,
		}); err != nil {
			return d, err
		}
	}
	if err := h.LinkSetName(d.device, formerInterface); err != nil {
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: this kernel renames no device that is up; Linux 6.2 and later do", err)
		}
		return d, fmt.Errorf("rename %s: %w", Interface, err)
	}
	d.renamed = true
	return d, nil
}

func (d *formerDevice) halve(r netlink.Route) error {
	if bits, all := r.Dst.Mask.Size(); bits == all {
		return fmt.Errorf("route %v is to one address and has no halves", r.Dst)
	}
	for _, half := range halvesOf(r) {
		if err := d.RouteReplace(&half); err != nil {
			return fmt.Errorf("route %v: %w", half.Dst, err)
		}
		d.halves = append(d.halves, half)
	}
	if err := netns.DeleteRoute(d.Handle, &r); err != nil {
		return fmt.Errorf("route %v: %w", r.Dst, err)
	}
	d.routes = append(d.routes, r)
	return nil
}

// leave removes the routes by the device, so that packets leave by the new one.
func (d *formerDevice) leave() error {
	var errs []error
	for _, half := range d.halves {
		errs = append(errs, netns.DeleteRoute(d.Handle, &half))
	}
	return errors.Join(errs...)
}

// restore undoes setAside.
func (d *formerDevice) restore() error {
	var errs []error
	if d.renamed {
		errs = append(errs, d.LinkSetName(d.device, Interface))
	}
	for _, r := range d.routes {
		errs = append(errs, d.RouteReplace(&r))
	}
	return errors.Join(append(errs, d.leave())...)
}

// halvesOf returns the routes to both halves of a route's prefix.
func halvesOf(r netlink.Route) []netlink.Route {
	bits, _ := r.Dst.Mask.Size()
	halves := make([]netlink.Route, 2)
	for i := range halves {
		to := slices.Clone(r.Dst.IP[len(r.Dst.IP)-len(r.Dst.Mask):])
		to[bits/8] |= byte(i) << (7 - bits%8)
		halves[i] = r
		halves[i].Dst = &net.IPNet{IP: to, Mask: net.CIDRMask(bits+1, 8*len(to))}
	}
	return halves
}

// awaitMoved waits until the former node's agent knows that a container has moved: from then on the node forwards
// packets for it.
func (l *Lab) awaitMoved(ctx context.Context, c ContainerStatus) {
	ctx, cancel := context.WithTimeout(ctx, movedTimeout)
	defer cancel()
	for {
		got, err := l.Agent(c.Node).
			GetEndpoint(ctx, connect.NewRequest(&pilasterv1.GetEndpointRequest{Key: l.ContainerID(c.Name)}))
		if err == nil && got.Msg.Endpoint.Moved {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// replace writes the new status of a container.
func (l *Lab) replace(c ContainerStatus) error {
	return l.change(func(all []ContainerStatus) ([]ContainerStatus, error) {
		for i := range all {
			if all[i].Name == c.Name {
				all[i] = c
			}
		}
		return all, nil
	})
}
