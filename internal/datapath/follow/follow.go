package follow

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/dropreason"
	"pilaster.io/pilaster/internal/endpoint"
)

// Programs are the programs with tracing, loaded.
type Programs struct {
	objectPrograms
	ring, from, traced *ebpf.Map
	networks           map[string]*ebpf.Program // of object files of networks, by name
}

// Objects are what the programs in whose place the tracing ones will be are made of.
type Objects struct {
	Shared *bpfobj.PilasterObjects
	Others map[string]*ebpf.Map // by symbol: of networks with object files of their own
	// SetConstants sets those of the other programs in an object file.
	SetConstants func(*ebpf.CollectionSpec) error
	// Networks read the tracing programs that are in object files of networks.
	Networks []func() (*ebpf.CollectionSpec, error)
}

// Load loads the programs with the constants and the maps of those in whose place they will be: packets are treated
// alike by both.
func Load(f dpapi.PacketFilter, o Objects) (*Programs, error) {
	spec, err := loadObject()
	if err != nil {
		return nil, err
	}
	filter, err := filterOf(f)
	if err != nil {
		return nil, err
	}
	spec.Maps[objectMapPilTraceFrom].MaxEntries = uint32(max(1, len(f.Senders)))
	all := bpfobj.MapsBySymbol(o.Shared)
	maps.Copy(all, o.Others)
	options, err := o.prepare(spec, filter, all)
	if err != nil {
		return nil, err
	}
	var loaded struct {
		objectPrograms
		Ring   *ebpf.Map `ebpf:"pil_trace"`
		From   *ebpf.Map `ebpf:"pil_trace_from"`
		Traced *ebpf.Map `ebpf:"pil_traced"`
	}
	if err := spec.LoadAndAssign(&loaded, &options); err != nil {
		return nil, fmt.Errorf("load the tracing programs: %w", err)
	}
	p := &Programs{loaded.objectPrograms, loaded.Ring, loaded.From, loaded.Traced, map[string]*ebpf.Program{}}
	all[objectMapPilTrace], all[objectMapPilTraceFrom], all[objectMapPilTraced] = p.ring, p.from, p.traced
	for _, read := range o.Networks {
		if err := p.loadNetwork(read, o, filter, all); err != nil {
			return nil, errors.Join(fmt.Errorf("load the tracing programs of a network: %w", err), p.Close())
		}
	}
	for _, r := range f.Senders {
		if err := p.from.Put(uint32(r.Device.HostIfindex), uint8(1)); err != nil {
			return nil, errors.Join(fmt.Errorf("tell the tracing programs the senders' devices: %w", err), p.Close())
		}
	}
	return p, nil
}

// prepare sets an object file's constants, and returns the options to load it with the maps of the other programs.
func (o Objects) prepare(spec *ebpf.CollectionSpec, filter objectPacketFilter, all map[string]*ebpf.Map) (
	options ebpf.CollectionOptions, err error,
) {
	if err := o.SetConstants(spec); err != nil {
		return options, err
	}
	if err := spec.Variables[objectVarFilter].Set(filter); err != nil {
		return options, err
	}
	options.MapReplacements = map[string]*ebpf.Map{}
	for name, m := range all {
		if own := spec.Maps[name]; own != nil {
			own.MaxEntries = m.MaxEntries()
			options.MapReplacements[name] = m
		}
	}
	return options, nil
}

// loadNetwork adds the programs of a network's object file.
func (p *Programs) loadNetwork(read func() (*ebpf.CollectionSpec, error), o Objects, filter objectPacketFilter,
	all map[string]*ebpf.Map) error {
	spec, err := read()
	if err != nil {
		return err
	}
	options, err := o.prepare(spec, filter, all)
	if err != nil {
		return err
	}
	c, err := ebpf.NewCollectionWithOptions(spec, options)
	if err != nil {
		return err
	}
	defer c.Close()
	for name := range spec.Programs {
		p.networks[name] = c.DetachProgram(name)
	}
	return nil
}

// Objects returns objects with these programs in place of those that they stand in for.
func (p *Programs) Objects(of bpfobj.PilasterObjects) bpfobj.PilasterObjects {
	of.PilContainer, of.PilUplinkIn, of.PilUplinkOut = p.PilContainer, p.PilUplinkIn, p.PilUplinkOut
	of.PilNimitz, of.PilTunnelIn, of.PilTapped = p.PilNimitz, p.PilTunnelIn, p.PilTapped
	of.PilEgressOut, of.PilEgressIn, of.PilEgressGw = p.PilEgressOut, p.PilEgressIn, p.PilEgressGw
	of.PilServiceOut, of.PilServiceIn = p.PilServiceOut, p.PilServiceIn
	of.PilExposedIn, of.PilExposedTun, of.PilExposedOut = p.PilExposedIn, p.PilExposedTun, p.PilExposedOut
	of.PilNode = p.PilNode
	return of
}

// Shared returns, by name, the programs that stand in for those of bpfobj that attached hooks run.
func (p *Programs) Shared() map[string]*ebpf.Program {
	return map[string]*ebpf.Program{
		bpfobj.PilasterProgPilContainer: p.PilContainer, bpfobj.PilasterProgPilNimitz: p.PilNimitz,
		bpfobj.PilasterProgPilUplinkIn: p.PilUplinkIn, bpfobj.PilasterProgPilUplinkOut: p.PilUplinkOut,
		bpfobj.PilasterProgPilTunnelIn: p.PilTunnelIn, bpfobj.PilasterProgPilTapped: p.PilTapped,
		bpfobj.PilasterProgPilEgressOut: p.PilEgressOut, bpfobj.PilasterProgPilEgressIn: p.PilEgressIn,
		bpfobj.PilasterProgPilEgressGw: p.PilEgressGw, bpfobj.PilasterProgPilNode: p.PilNode,
		bpfobj.PilasterProgPilServiceOut: p.PilServiceOut, bpfobj.PilasterProgPilServiceIn: p.PilServiceIn,
		bpfobj.PilasterProgPilExposedIn: p.PilExposedIn, bpfobj.PilasterProgPilExposedTun: p.PilExposedTun,
		bpfobj.PilasterProgPilExposedOut: p.PilExposedOut,
	}
}

// OfNetworks returns, by name, the programs that stand in for those of networks with object files of their own.
func (p *Programs) OfNetworks() map[string]*ebpf.Program {
	all := map[string]*ebpf.Program{objectProgPilIla: p.PilIla, objectProgPilIlaIn: p.PilIlaIn}
	maps.Copy(all, p.networks)
	return all
}

// IDs returns the ids of the programs.
func (p *Programs) IDs() (ids []ebpf.ProgramID) {
	for _, program := range slices.AppendSeq(slices.Collect(maps.Values(p.Shared())), maps.Values(p.OfNetworks())) {
		if info, err := program.Info(); err == nil {
			id, _ := info.ID()
			ids = append(ids, id)
		}
	}
	return ids
}

// Close releases the programs. Those that are attached go on.
func (p *Programs) Close() error {
	err := errors.Join(p.objectPrograms.Close(), p.ring.Close(), p.from.Close(), p.traced.Close())
	for _, program := range p.networks {
		err = errors.Join(err, program.Close())
	}
	return err
}

// Report calls deliver with each event until ctx ends.
func (p *Programs) Report(ctx context.Context, deliver func(dpapi.PacketEvent), log *slog.Logger) error {
	reader, err := ringbuf.NewReader(p.ring)
	if err != nil {
		return err
	}
	defer reader.Close()
	defer context.AfterFunc(ctx, func() { reader.Close() })()
	for {
		record, err := reader.Read()
		if errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read trace events: %w", err)
		}
		event, err := decode(record.RawSample)
		if err != nil {
			log.Warn("cannot decode a trace event", "error", err)
			continue
		}
		deliver(event)
	}
}

func filterOf(f dpapi.PacketFilter) (o objectPacketFilter, err error) {
	for _, side := range []struct {
		given []netip.Addr
		into  []objectAddr
	}{{f.Sources, o.Src[:]}, {f.Destinations, o.Dst[:]}} {
		if len(side.given) == 0 || len(side.given) > len(side.into) {
			return o, fmt.Errorf("%d addresses; choose 1 to %d", len(side.given), len(side.into))
		}
		for i, a := range side.given {
			words := bpfobj.ToAddr(a)
			side.into[i] = objectAddr{Hi: words.Hi, Lo: words.Lo}
		}
	}
	o.Vni, o.Port, o.Proto = f.VNI, swapped(f.Port), f.Protocol
	return o, nil
}

// swapped converts a port between the byte orders of network and machine.
func swapped(port uint16) uint16 {
	return binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, port))
}

// Results of programs, by the kernel's names TCX_NEXT, TC_ACT_OK, TC_ACT_SHOT, TC_ACT_STOLEN and TC_ACT_REDIRECT.
var actions = map[int32]string{-1: "pass", 0: "pass", 2: "drop", 4: "drop", 7: "redirect"}

var cacheResults = map[uint32]string{1: "hit", 2: "miss"}

// hooks are the names of bpf/common/event.h's enum hook, as of dpapi.Event.
var hooks = []string{
	"", "container", "uplink-in", "uplink-out", "node", "edge-in", "edge-out", "tunnel", "gateway", "switch",
}

func decode(sample []byte) (dpapi.PacketEvent, error) {
	var e objectPacketEvent
	if err := binary.Read(bytes.NewReader(sample), binary.NativeEndian, &e); err != nil {
		return dpapi.PacketEvent{}, err
	}
	if int(e.Hook) >= len(hooks) {
		return dpapi.PacketEvent{}, fmt.Errorf("hook %d is unknown", e.Hook)
	}
	event := dpapi.PacketEvent{
		Time: e.Time, Packet: e.Packet, Point: dpapi.PacketPoint(e.Point), Hook: hooks[e.Hook],
		Device: e.Ifindex, Protocol: e.Proto, SourcePort: swapped(e.Sport), DestinationPort: swapped(e.Dport),
		Length: int(e.Length), Cache: cacheResults[e.Cache], Target: e.Target, Endpoint: endpoint.ID(e.Endpoint),
		Egress: e.Dir == 0, Rule: e.Rule, VNI: e.Vni, Lost: e.Lost,
	}
	if slices.Contains([]uint8{4, 6}, e.Version) {
		event.Source, event.Destination = addr(e.Src), addr(e.Dst)
	}
	if event.Point == dpapi.PacketLeaves {
		event.Action = actions[e.Verdict]
	}
	if e.Reason != 0 {
		event.Reason = dropreason.Reason(e.Reason).String()
	}
	return event, nil
}

func addr(a objectAddr) netip.Addr { return bpfobj.PilasterAddr{Hi: a.Hi, Lo: a.Lo}.Addr().Unmap() }
