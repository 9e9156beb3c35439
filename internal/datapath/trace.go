package datapath

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/follow"
	"pilaster.io/pilaster/internal/datapath/hook"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/netns"
)

var _ dpapi.Tracing = (*Datapath)(nil)

// NextHop asks the FIB for a packet that arrives at the node's end of the device pair, as the programs do. An IPv4
// packet is one of the kernel's tunnel device, so it comes from the node itself, as one without a source does.
func (d *Datapath) NextHop(from, to netip.Addr) (dpapi.NextHop, error) {
	options := &netlink.RouteGetOptions{IifIndex: d.NodeFar, SrcAddr: from.AsSlice()}
	own := to.Is4() || !from.IsValid()
	if own {
		options.IifIndex = 0
	}
	routes, err := netns.List(func() ([]netlink.Route, error) {
		return d.Netlink.RouteGetWithOptions(to.AsSlice(), options)
	})
	if err != nil {
		return dpapi.NextHop{}, fmt.Errorf("no route to %v: %w", to, err)
	}
	if len(routes) == 0 {
		return dpapi.NextHop{}, fmt.Errorf("no route to %v", to)
	}
	l, err := d.Netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return dpapi.NextHop{}, fmt.Errorf("device of the route to %v: %w", to, err)
	}
	if !own && !slices.ContainsFunc(d.Uplinks, func(u netlink.Link) bool {
		return u.Attrs().Index == l.Attrs().Index
	}) {
		return dpapi.NextHop{}, fmt.Errorf("the route to %v leads by %s, which is no uplink (%s): start the agent "+
			"with --uplink %[2]s too, or change the route", to, l.Attrs().Name, d.UplinkNames())
	}
	via, _ := netip.AddrFromSlice(routes[0].Gw)
	source, _ := netip.AddrFromSlice(routes[0].Src)
	return dpapi.NextHop{Device: l.Attrs().Name, Via: via.Unmap(), Source: source.Unmap()}, nil
}

// DeviceName returns the name of a device by its number in the maps.
func (d *Datapath) DeviceName(number uint32) string {
	if number&device.OnUplink != 0 {
		return "macvlan of " + d.UplinkNames()
	}
	l, err := d.Netlink.LinkByIndex(int(number))
	if err != nil {
		return "device " + strconv.Itoa(int(number))
	}
	return l.Attrs().Name
}

// Follow puts the tracing programs in the place of those of the packet path: on the devices of the senders, on the
// uplink, on the tunnel and on the node's device. When ctx ends, it puts those back. If this process ends before, the
// tracing programs forward packets as the others do, and Restore replaces them like those of another build.
func (d *Datapath) Follow(ctx context.Context, f dpapi.PacketFilter) (<-chan dpapi.PacketEvent, error) {
	programs, err := follow.Load(f, follow.Objects{
		Shared: &d.Objects, Others: d.networkMaps, Networks: d.traced,
		SetConstants: d.setTracedConstants,
	})
	if err != nil {
		return nil, fmt.Errorf("trace packets: %w; packets flow as before", err)
	}
	for _, id := range programs.IDs() {
		d.StandIns.Store(id, true)
	}
	d.standInWork.begin(programs)
	restore := func() error {
		err := errors.Join(d.attachTraced(f), d.AttachUplinkPrograms())
		isTracing := func(id ebpf.ProgramID) bool { return slices.Contains(programs.IDs(), id) }
		for _, r := range f.Senders {
			err = errors.Join(err, host.IgnoreGone(d.SwapEntry(r, isTracing, d.entryPrograms())))
		}
		for _, id := range programs.IDs() {
			d.StandIns.Delete(id)
		}
		return errors.Join(err, d.standInWork.end(programs), programs.Close())
	}
	traced := d.withPrograms(programs)
	err = errors.Join(d.attachTracedUplink(programs), traced.AttachEgressPrograms(),
		traced.AttachServicePrograms(), traced.attachTraced(f))
	own, objects := d.entryIDs(), programs.Objects(d.Objects)
	tracing := entryPrograms(&objects)
	maps.Copy(tracing, programs.OfNetworks())
	for _, r := range f.Senders {
		isOwn := func(id ebpf.ProgramID) bool { return own[id] }
		err = errors.Join(err, host.IgnoreGone(d.SwapEntry(r, isOwn, tracing)))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("trace packets: %w", err), restore())
	}
	events := make(chan dpapi.PacketEvent)
	go func() {
		defer close(events)
		deliver := func(e dpapi.PacketEvent) {
			select {
			case events <- e:
			case <-ctx.Done():
			}
		}
		if err := programs.Report(ctx, deliver, d.Log); err != nil {
			d.Log.Warn("trace packets", "error", err)
			<-ctx.Done()
		}
		if err := restore(); err != nil {
			d.Log.Error("the tracing programs stay attached, and packets flow; restart the agent to replace them",
				"error", err)
		}
	}()
	return events, nil
}

// withPrograms returns a data path that attaches other programs at the hooks of this one. Tunnel packets pass the VXLAN
// device, where the programs with tracing report them, except on a node that takes part in offloads.
func (d *Datapath) withPrograms(p *follow.Programs) *Datapath {
	h := &host.Host{
		Node: d.Node, Netlink: d.Netlink, Sysctls: d.Sysctls, Uplinks: d.Uplinks, Objects: p.Objects(d.Objects),
		Log: d.Log, DeviceKind: d.DeviceKind, BPFFS: d.BPFFS, NodePrefix: d.NodePrefix,
		Plan: d.Plan, MTUReserve: d.MTUReserve, AcceptMark: d.AcceptMark,
	}
	hooks := &hook.Hooks{Host: h, NodeNear: d.NodeNear, NodeFar: d.NodeFar, ActiveOVSPorts: d.ActiveOVSPorts}
	return &Datapath{Devices: device.NewDevices(hooks), config: d.config}
}

// entryPrograms returns the entry programs of containers that a trace can replace, by name.
func entryPrograms(o *bpfobj.PilasterObjects) map[string]*ebpf.Program {
	return map[string]*ebpf.Program{
		bpfobj.PilasterProgPilContainer: o.PilContainer, bpfobj.PilasterProgPilNimitz: o.PilNimitz,
	}
}

// entryPrograms returns those of this data path.
func (d *Datapath) entryPrograms() map[string]*ebpf.Program {
	all := entryPrograms(&d.Objects)
	for _, e := range d.Entries() {
		all[e.Name] = e.Program
	}
	return all
}

// setTracedConstants gives an object file with tracing programs the constants of the others, except that no packet may
// pass by a place that reports it.
func (d *Datapath) setTracedConstants(spec *ebpf.CollectionSpec) error {
	values := d.constants(d.AcceptMark, d.cookie)
	for name, value := range d.networkConstants {
		values[name] = value
	}
	values[bpfobj.PilasterVarDirectPort] = uint16(0)
	for name, value := range values {
		if v := spec.Variables[name]; v != nil {
			if err := v.Set(value); err != nil {
				return fmt.Errorf("set %s: %w", name, err)
			}
		}
	}
	return nil
}

// attachTracedUplink replaces the programs to which those of the uplink hand packets.
func (d *Datapath) attachTracedUplink(programs *follow.Programs) error {
	for index, p := range d.UplinkPrograms {
		info, err := p.Info()
		if err != nil {
			return err
		}
		if tracing := programs.OfNetworks()[info.Name]; tracing != nil {
			if err := d.Objects.PilUplinksV1.Put(index, tracing); err != nil {
				return fmt.Errorf("set program %s for packets from the uplink: %w", info.Name, err)
			}
		}
	}
	return nil
}

// entryIDs returns the ids of this data path's own entry programs.
func (d *Datapath) entryIDs() map[ebpf.ProgramID]bool {
	ids := map[ebpf.ProgramID]bool{}
	for _, p := range d.entryPrograms() {
		if info, err := p.Info(); err == nil {
			id, _ := info.ID()
			ids[id] = true
		}
	}
	return ids
}

// attachTraced attaches the programs that packets to the receivers, from the fabric and from the node meet.
func (d *Datapath) attachTraced(f dpapi.PacketFilter) error {
	err := errors.Join(d.AttachTunnelPrograms(), d.AttachUplink(), host.IgnoreGone(d.AttachNode()))
	for _, r := range f.Receivers {
		if d.ActiveOVSPorts != nil {
			err = errors.Join(err, d.AttachTapped(r.Device.HostIfindex))
		}
	}
	return err
}
