package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// Nimitz is the eBPF switch of network nimitz: the stages in bpf/net/nimitz around a VXLAN device of the kernel. Its
// maps are pinned and outlive the process.
type Nimitz struct {
	d      *Datapath
	maps   []pipelineMap
	tables bpfobj.PilasterObjects // whose maps are those of maps
	vteps  *ebpf.Map              // of replication; nil without tunnels over IPv4
	over4  bool                   // the tunnels are over IPv4, and there is no gateway

	mu    sync.Mutex
	used  map[*ebpf.Map]int
	ports map[pipeline.Port]uint32 // indexes of the containers' devices, and of the gateway's
}

// Nimitz makes the VXLAN device, if it does not exist yet, and the switch that uses it.
func (d *Datapath) Nimitz() (*Nimitz, error) {
	if err := d.openTunnel(tenant.Nimitz); err != nil {
		return nil, err
	}
	d.SetEntry(tenant.Nimitz, device.EntryProgram{Program: d.Objects.PilNimitz, Name: bpfobj.PilasterProgPilNimitz})
	return newSwitch(&Nimitz{d: d, maps: pipelineMaps, tables: d.Objects})
}

// TunnelTables are the tables of a network with the pipeline of network nimitz and tunnels over IPv4.
type TunnelTables struct{ Senders, Foreign, Forward, Replication *ebpf.Map }

// Switch4 makes the VXLAN device, if it does not exist yet, and a switch that uses it for tunnels over IPv4: packets
// from there go to a program of the network. The node gets its tunnel address.
func (d *Datapath) Switch4(name string, entry device.EntryProgram, fromTunnel *ebpf.Program, t TunnelTables,
) (*Nimitz, error) {
	if err := d.openTunnel(name); err != nil {
		return nil, err
	}
	own, ok := d.OwnVTEP4()
	if !ok {
		return nil, fmt.Errorf("the prefix %v has no tunnel address for node %v; nothing was changed: use a shorter "+
			"prefix", d.config.VTEP4, d.config.NodePrefix)
	}
	if err := d.AddTunnelAddress(own); err != nil {
		return nil, err
	}
	d.SetEntry(name, entry)
	d.UplinkPrograms[hook.UplinkTunnel4] = fromTunnel
	n := &Nimitz{d: d, tables: d.Objects, vteps: t.Replication, over4: true}
	n.tables.NimSendersV1, n.tables.NimForeignV1, n.tables.NimForwardV1 = t.Senders, t.Foreign, t.Forward
	for _, m := range pipelineMaps {
		if m.mapOf(&n.tables) != m.mapOf(&d.Objects) {
			n.maps = append(n.maps, m)
		}
	}
	n.maps = append(n.maps, pipelineMap{
		"replication", "", func(*bpfobj.PilasterObjects) *ebpf.Map { return t.Replication }, decodeReplication,
	})
	return newSwitch(n)
}

// OwnVTEP4 returns this node's IPv4 tunnel address; false if it has none.
func (d *Datapath) OwnVTEP4() (netip.Addr, bool) {
	return address.VTEP4(d.config.VTEP4, d.config.Plan.NodeNumber(d.config.NodePrefix))
}

// openTunnel makes the VXLAN device, if it does not exist yet, for a network.
func (d *Datapath) openTunnel(name string) error {
	if d.config.Device == endpoint.Macvlan {
		return fmt.Errorf("network %s does not work with macvlans, which have no device on the node; "+
			"nothing was changed: start the agent with --device %s or %s", name, endpoint.Veth, endpoint.Netkit)
	}
	if _, err := d.Netlink.LinkByName(pipeline.NodeSide); err == nil {
		return fmt.Errorf(
			"%s exists: this node's tunnels are Open vSwitch's; nothing was changed: "+
				"start the agent with --nimitz ovs, or drain the node and run `pilaster node reset`",
			pipeline.NodeSide,
		)
	} else if !errors.As(err, new(netlink.LinkNotFoundError)) {
		return fmt.Errorf("find %s: %w", pipeline.NodeSide, err)
	}
	// Another build's programs may be attached to a device that exists: Restore replaces them later, when all maps are
	// complete.
	made, err := d.CreateTunnel()
	if err == nil && made {
		err = d.AttachTunnel()
	}
	return err
}

// newSwitch counts the entries of a switch and finds its ports.
func newSwitch(n *Nimitz) (*Nimitz, error) {
	n.used, n.ports = map[*ebpf.Map]int{}, map[pipeline.Port]uint32{}
	for _, t := range n.maps {
		keys, _, err := bpfobj.RawEntries(t.mapOf(&n.tables))
		if err != nil {
			return nil, fmt.Errorf("count the entries of %s: %w", t.name, err)
		}
		n.used[t.mapOf(&n.tables)] = len(keys)
	}
	err := bpfobj.ForEachEntry(
		n.d.Objects.PilPortsV1,
		func(device uint32, p bpfobj.PilasterDevEp) { n.ports[pipeline.Port(p.Endpoint)] = device },
	)
	return n, err
}

// Plug makes a device a port. A container's packets enter through the container's program, which is already attached.
func (n *Nimitz) Plug(_ context.Context, port pipeline.Port, is pipeline.Device) error {
	device := is.Name
	n.mu.Lock()
	defer n.mu.Unlock()
	if port == pipeline.Gateway {
		index, err := n.d.PlugGateway(hook.OverlaySide, device)
		if err != nil {
			return fmt.Errorf("make %s %v: %w", device, port, err)
		}
		n.ports[port] = index
		return nil
	}
	l, err := n.d.Netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("%v: device %s: %w", port, device, err)
	}
	index := uint32(l.Attrs().Index)
	switch {
	case port == pipeline.VXLAN || port == 0:
		err = errors.New("devices cannot be connected to this port")
	default:
		if old, there := n.ports[port]; there && old != index {
			if err := host.IgnoreGone(n.unplug(port, old)); err != nil {
				return err
			}
		}
		err = n.d.Objects.PilPortsV1.Put(
			index,
			bpfobj.PilasterDevEp{Endpoint: uint32(port), Network: hook.NetworkNimitz},
		)
	}
	if err != nil {
		return fmt.Errorf("make %s %v: %w", device, port, err)
	}
	n.ports[port] = index
	n.d.portUsers.set(port, n, true)
	return nil
}

// portUsers are the switches of which a port is one. The maps of ports are shared, so an entry stays while one of them
// uses it: a container is on two of them while its tenant moves between their networks.
type portUsers struct {
	mu sync.Mutex
	m  map[pipeline.Port]map[*Nimitz]bool
}

// set records that a switch uses a port, or no longer does, and reports whether another one uses it.
func (u *portUsers) set(port pipeline.Port, by *Nimitz, uses bool) (others bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.m == nil {
		u.m = map[pipeline.Port]map[*Nimitz]bool{}
	}
	of := u.m[port]
	if of == nil {
		of = map[*Nimitz]bool{}
		u.m[port] = of
	}
	if of[by] = true; !uses {
		delete(of, by)
	}
	if len(of) == 0 {
		delete(u.m, port)
	}
	return len(of) > 1 || len(of) == 1 && !of[by]
}

// Unplug stops packets from a port. Entries that send to the port must be removed first, or their packets are lost.
func (n *Nimitz) Unplug(_ context.Context, port pipeline.Port) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if port == pipeline.Gateway && n.over4 {
		return nil // that of network nimitz
	}
	if port == pipeline.Gateway {
		delete(n.ports, port)
		return n.d.SetTunnelNode(func(v *bpfobj.PilasterNimitzNode) { v.Gateway = 0 })
	}
	index, there := n.ports[port]
	if n.d.portUsers.set(port, n, false) {
		delete(n.ports, port)
		return nil
	}
	if !there {
		return nil
	}
	return n.unplug(port, index)
}

func (n *Nimitz) unplug(port pipeline.Port, index uint32) error {
	if err := n.d.Objects.PilPortsV1.Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove %v: %w", port, err)
	}
	delete(n.ports, port)
	return nil
}

// Apply removes entries and adds others; after an error nothing has changed. It replaces an entry with the same match
// in one step, then adds new entries, then removes old ones, so that each packet finds one of them.
func (n *Nimitz) Apply(_ context.Context, remove, add []pipeline.Entry) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := pipelineChange{n: n, added: map[*ebpf.Map]int{}}
	stays := map[any]bool{}
	for _, e := range add {
		stays[e.Match()] = true
		if err := c.plan(e, true); err != nil {
			return fmt.Errorf("%w; nothing was changed", err)
		}
	}
	for _, e := range remove {
		if stays[e.Match()] {
			continue
		}
		if err := c.plan(e, false); err != nil {
			return fmt.Errorf("%w; nothing was changed", err)
		}
	}
	for _, t := range n.maps {
		m := t.mapOf(&n.tables)
		if used, more, room := n.used[m], c.added[m], int(m.MaxEntries()); used+more > room {
			return t.full(room, used, more)
		}
	}
	if err := c.write(); err != nil {
		return errors.Join(err, c.undo())
	}
	if len(c.offloads) == 0 {
		return nil
	}
	if err := n.d.AttachOffloads(); err != nil {
		return errors.Join(err, c.undo(), n.d.AttachOffloads())
	}
	return nil
}

// full is the error of a change that does not fit into a map.
func (t pipelineMap) full(room, used, more int) error {
	advice := "raise the agent's limit, or run tenants with fewer mappings and services here"
	if t.pin == bpfobj.PinNimOffloads || t.pin == bpfobj.PinNimBackends {
		advice = "stop offloads of tenants with containers on this node, or of which it is a frontend; `pilaster " +
			"offload list` shows them"
	}
	return fmt.Errorf("%w: the map of %s has room for %d entries, holds %d and would get %d more; nothing was "+
		"changed: %s",
		network.ErrConflict, t.name, room, used, more, advice)
}

// pipelineChange is one Apply.
type pipelineChange struct {
	n       *Nimitz
	entries []mapEntry
	undoLog []mapEntry // replaced entries, in the order of replacement

	offloads []pipeline.Entry // entries of the stage Sharing
	added    map[*ebpf.Map]int
}

func (c *pipelineChange) plan(e pipeline.Entry, put bool) error {
	if e.Stage() == pipeline.Sharing {
		c.offloads = append(c.offloads, e)
	}
	r, err := c.n.encode(e)
	if err != nil && (put || !errors.Is(err, errNoDevice)) { // the container of an entry to remove may be gone
		return fmt.Errorf("%v: %w", e, err)
	}
	old, err := r.lookup()
	if err != nil {
		return err
	}
	if put && old == nil {
		c.added[r.table]++
	}
	if !put {
		r.value = nil
	}
	c.entries = append(c.entries, r)
	return nil
}

func (c *pipelineChange) write() error {
	for _, r := range c.entries {
		old, err := r.lookup()
		if err != nil {
			return err
		}
		if err := c.put(r, old); err != nil {
			return err
		}
		c.undoLog = append(c.undoLog, mapEntry{r.table, r.key, old})
	}
	return nil
}

// put writes the entry, or deletes the key if the entry has no value, and counts the map's entries.
func (c *pipelineChange) put(r mapEntry, old []byte) error {
	switch {
	case r.value != nil:
		if err := r.table.Put(r.key, r.value); err != nil {
			return fmt.Errorf("write an entry of %v: %w", r.table, err)
		}
		if old == nil {
			c.n.used[r.table]++
		}
	case old != nil:
		if err := r.table.Delete(r.key); err != nil {
			return fmt.Errorf("remove an entry of %v: %w", r.table, err)
		}
		c.n.used[r.table]--
	}
	return nil
}

func (c *pipelineChange) undo() error {
	var errs []error
	for i := len(c.undoLog) - 1; i >= 0; i-- {
		now, err := c.undoLog[i].lookup()
		if err == nil {
			err = c.put(c.undoLog[i], now)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("and the entries written before could not be removed: %w", err)
	}
	return nil
}

// Check compares a port and its entries with the kernel.
func (n *Nimitz) Check(_ context.Context, port pipeline.Port, device pipeline.Device, entries []pipeline.Entry) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	l, err := n.d.Netlink.LinkByName(device.Name)
	if err != nil {
		return fmt.Errorf("%v: device %s: %w", port, device.Name, err)
	}
	var is bpfobj.PilasterDevEp
	want := bpfobj.PilasterDevEp{Endpoint: uint32(port), Network: hook.NetworkNimitz}
	if err := n.d.Objects.PilPortsV1.Lookup(uint32(l.Attrs().Index), &is); err != nil || is != want {
		return fmt.Errorf("device %s is not %v of the switch", device.Name, port)
	}
	for _, e := range entries {
		r, err := n.encode(e)
		if err != nil {
			return fmt.Errorf("%v: %w", e, err)
		}
		if there, err := r.lookup(); err != nil || !bytes.Equal(there, r.value) {
			return errors.Join(err, fmt.Errorf("the switch does not have %v", e))
		}
	}
	return nil
}

// SetMTU sets the tunnel device's MTU to what the uplink can carry.
func (n *Nimitz) SetMTU(mtu int) error { return n.d.SetTunnelMTU(mtu) }

// Entries reads the entries from the kernel.
func (n *Nimitz) Entries(context.Context) ([]pipeline.Entry, error) {
	var all []pipeline.Entry
	for _, t := range n.maps {
		err := t.forEachEntry(t.mapOf(&n.tables), func(e pipeline.Entry) { all = append(all, e) })
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// Usage reads from the kernel how full the maps are.
func (n *Nimitz) Usage() ([]network.Entries, error) {
	var all []network.Entries
	for _, t := range n.maps {
		m := t.mapOf(&n.tables)
		keys, _, err := bpfobj.RawEntries(m)
		if err != nil {
			return nil, fmt.Errorf("count the entries of %s: %w", t.name, err)
		}
		all = append(all, network.Entries{Table: t.name, Used: len(keys), Capacity: int(m.MaxEntries())})
	}
	return all, nil
}

func (t pipelineMap) forEachEntry(m *ebpf.Map, show func(pipeline.Entry)) error {
	keys, values, err := bpfobj.RawEntries(m)
	for i := range keys {
		var e pipeline.Entry
		if e, err = t.decode(keys[i], values[i]); err != nil {
			break
		}
		show(e)
	}
	if err != nil {
		return fmt.Errorf("read the map of %s: %w", t.name, err)
	}
	return nil
}
