package datapath

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

// mapEntry is an entry of the pipeline as bytes of a map. Without a value, the map has no such key.
type mapEntry struct {
	table      *ebpf.Map
	key, value []byte
}

// lookup returns the map's value for the key; nil if there is none. A lookup in a prefix map returns the longest match,
// so values of prefixes begin with their own length, as keys do.
func (r mapEntry) lookup() ([]byte, error) {
	value, err := r.table.LookupBytes(r.key)
	if err != nil {
		return nil, fmt.Errorf("look up in %v: %w", r.table, err)
	}
	if value != nil && r.table.Type() == ebpf.LPMTrie && !bytes.Equal(value[:4], r.key[:4]) {
		return nil, nil
	}
	return value, nil
}

// pipelineMap is one map of the pipeline. Its name in messages is that of its entries.
type pipelineMap struct {
	name   string
	pin    string
	mapOf  func(*bpfobj.PilasterObjects) *ebpf.Map
	decode func(key, value []byte) (pipeline.Entry, error)
}

// pipelineMaps are the maps of the pipeline, in the order of its stages.
var pipelineMaps = []pipelineMap{
	{"peers", bpfobj.PinNimPeers, func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimPeersV1 }, decodePeer},
	{
		"senders",
		bpfobj.PinNimSenders,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimSendersV1 },
		decodeSender,
	},
	{
		"foreign",
		bpfobj.PinNimForeign,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimForeignV1 },
		decodeForeign,
	},
	{
		"outside",
		bpfobj.PinNimOutside,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimOutsideV1 },
		decodeOutside,
	},
	{"dnat", bpfobj.PinNimDnat, func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimDnatV1 }, decodeDNAT},
	{"snat", bpfobj.PinNimSnat, func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimSnatV1 }, decodeSNAT},
	{
		"forwarding",
		bpfobj.PinNimForward,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimForwardV1 },
		decodeForward,
	},
	{
		"offloads",
		bpfobj.PinNimOffloads,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimOffloadsV1 },
		decodeOffload,
	},
	{
		"backends",
		bpfobj.PinNimBackends,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimBackendsV1 },
		decodeBackend,
	},
	{
		"fronted",
		bpfobj.PinNimFronted,
		func(o *bpfobj.PilasterObjects) *ebpf.Map { return o.NimFrontedV1 },
		decodeFronted,
	},
}

// scopeOf returns the scope that the programs use: a family and a VNI.
func scopeOf(a netip.Addr, vni pipeline.VNI) uint32 {
	family := uint32(6)
	if a.Is4() {
		family = 4
	}
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], family<<24|uint32(vni))
	return binary.NativeEndian.Uint32(b[:])
}

func scopeFrom(scope uint32) (is4 bool, vni pipeline.VNI) {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], scope)
	n := binary.BigEndian.Uint32(b[:])
	return n>>24 == 4, pipeline.VNI(n & uint32(pipeline.MaxVNI))
}

const scopeBits = 32

func prefixKey(p netip.Prefix, vni pipeline.VNI) bpfobj.PilasterScopedPrefix {
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	return bpfobj.PilasterScopedPrefix{
		Bits:    uint32(scopeBits + bits),
		Scope:   scopeOf(p.Addr(), vni),
		Address: bpfobj.ToAddr(p.Masked().Addr()),
	}
}

func addrKey(a netip.Addr, vni pipeline.VNI) bpfobj.PilasterScopedAddr {
	return bpfobj.PilasterScopedAddr{Address: bpfobj.ToAddr(a), Scope: scopeOf(a, vni)}
}

// errNoDevice means that an entry sends to a port that has no device. The map entry has a key then.
var errNoDevice = errors.New("the port has no device yet: connect one first")

// encode returns the map entry of a pipeline entry, or an error if the entry is invalid.
func (n *Nimitz) encode(e pipeline.Entry) (mapEntry, error) {
	o := &n.tables
	switch e := e.(type) {
	case pipeline.Peer:
		if !e.Nodes.IsValid() || !e.Nodes.Addr().Is6() {
			return mapEntry{}, errors.New("a node's prefix must be IPv6")
		}
		bits := uint32(e.Nodes.Bits())
		return newMapEntry(o.NimPeersV1, bpfobj.PilasterPeerKey{Bits: bits,
			Node: bpfobj.ToAddr(e.Nodes.Masked().Addr())}, bits), nil
	case pipeline.Sender:
		if err := valid(e.VNI, e.Address); err != nil {
			return mapEntry{}, err
		}
		key := bpfobj.PilasterSenderKey{Source: bpfobj.ToAddr(e.Address), Port: uint32(e.Port),
			Scope: scopeOf(e.Address, 0)}
		return newMapEntry(o.NimSendersV1, key, bpfobj.PilasterSender{Vni: uint32(e.VNI),
			Identity: uint32(e.Identity)}), nil
	case pipeline.Foreign:
		return encodeForeign(o.NimForeignV1, e)
	case pipeline.NorthSouth:
		if err := valid(e.VNI, e.To.Addr()); err != nil {
			return mapEntry{}, err
		}
		key := prefixKey(e.To, e.VNI)
		return newMapEntry(o.NimOutsideV1, key, key.Bits), nil
	case pipeline.DNAT:
		return translationEntry(o.NimDnatV1, e.VNI, e.Virtual, e.RealVNI, e.Real)
	case pipeline.SNAT:
		return translationEntry(o.NimSnatV1, e.VNI, e.Real, e.VNI, e.Virtual)
	case pipeline.Forward:
		return n.encodeForward(e)
	case pipeline.Replication:
		return encodeReplication(n.vteps, e)
	case pipeline.Offload:
		return encodeOffload(o.NimOffloadsV1, e)
	case pipeline.Backend:
		return newMapEntry(o.NimBackendsV1, uint32(e.VNI), bpfobj.PilasterBackend{
			Offload: e.Offload, Asks: bpfobj.BoolToUint32(e.Asks),
		}), valid(e.VNI, netip.IPv6Unspecified())
	case pipeline.Fronted:
		return newMapEntry(o.NimFrontedV1, addrKey(e.Address, e.VNI), bpfobj.PilasterFronted{
			Offload: e.Offload, App: uint32(e.App),
		}), valid(e.VNI, e.Address)
	}
	return mapEntry{}, fmt.Errorf("unknown type %T of entry", e)
}

func encodeForeign(m *ebpf.Map, e pipeline.Foreign) (mapEntry, error) {
	if err := errors.Join(valid(e.Theirs, e.Source.Addr()), valid(e.VNI, e.Source.Addr())); err != nil {
		return mapEntry{}, err
	}
	edge := bpfobj.ToAddr(e.Edge.Addr())
	switch {
	case e.Edge.Addr().Is4() && e.Edge.IsSingleIP():
		edge.Hi = edge.Lo // of the IPv4-mapped address; see evpn_decap
	case !e.Edge.Addr().Is6() || e.Edge.Bits() != address.NodeBits:
		return mapEntry{}, fmt.Errorf("%v is not a node's prefix", e.Edge)
	}
	source := prefixKey(e.Source, e.Theirs)
	key := bpfobj.PilasterRemoteSenderKey{
		Bits:   address.NodeBits + source.Bits,
		Scope:  source.Scope,
		Edge:   edge.Hi,
		Source: source.Address,
	}
	return newMapEntry(m, key, bpfobj.PilasterRemoteSender{Bits: key.Bits, Vni: uint32(e.VNI)}), nil
}

// routeRelays is ROUTE_RELAYS.
const routeRelays = 1 << 31

func (n *Nimitz) encodeForward(e pipeline.Forward) (mapEntry, error) {
	if err := valid(e.VNI, e.To.Addr()); err != nil {
		return mapEntry{}, err
	}
	key := prefixKey(e.To, e.VNI)
	value := bpfobj.PilasterRoute{Bits: key.Bits, Port: uint32(e.Port)}
	switch {
	case e.Port == pipeline.VXLAN:
		if !pipeline.IsVTEP(e.VTEP) && (!n.over4 || !e.VTEP.Is4()) {
			return mapEntry{}, fmt.Errorf("%v is not a node's tunnel address", e.VTEP)
		}
		value.Vtep, value.Outside = bpfobj.ToAddr(e.VTEP), bpfobj.BoolToUint32(e.Outside)
		if e.VTEP.Is4() {
			value.Vtep.Hi, value.Ifindex = macWords(e.MAC).Hi, uint32(e.Wire)
		} else {
			value.Ifindex = e.Offload | bpfobj.BoolToUint32(e.Relays)*routeRelays
		}
	case e.Port != 0 && e.Port != pipeline.Gateway:
		index, there := n.ports[e.Port]
		if !there {
			return newMapEntry(n.tables.NimForwardV1, key, value), errNoDevice
		}
		value.Ifindex, value.Vtep = index, macWords(e.MAC)
	}
	return newMapEntry(n.tables.NimForwardV1, key, value), nil
}

func encodeReplication(m *ebpf.Map, e pipeline.Replication) (mapEntry, error) {
	var value bpfobj.PilasterReplication
	if m == nil || len(e.VTEPs) != len(value.Vteps) {
		return mapEntry{}, errors.New("no frames are replicated here")
	}
	for _, a := range e.Used() {
		if err := valid(e.VNI, a); err != nil || !a.Is4() {
			return mapEntry{}, errors.Join(err, fmt.Errorf("%v is no IPv4 tunnel address", a))
		}
		value.Vteps[value.Count] = binary.NativeEndian.Uint32(a.AsSlice())
		value.Count++
	}
	return newMapEntry(m, uint32(e.VNI), value), nil
}

func encodeOffload(m *ebpf.Map, e pipeline.Offload) (mapEntry, error) {
	value := bpfobj.PilasterOffload{
		Vni: uint32(e.VNI), Epoch: e.Epoch, Fronts: bpfobj.BoolToUint32(e.Fronts),
	}
	if e.ID == 0 || e.ID > tenant.MaxOffloadID || e.VNI > pipeline.MaxVNI {
		return mapEntry{}, errors.New("id and VNI have 24 bits, and the id is not 0")
	}
	all := append([]netip.Prefix{e.Backend}, append(e.To[:], e.From[:]...)...)
	for i, p := range all {
		if (i == 0 || p.IsValid()) && (!p.Addr().Is6() || p.Bits() != address.NodeBits) {
			return mapEntry{}, fmt.Errorf("%v is not a node's prefix", p)
		}
	}
	value.Backend = bpfobj.ToAddr(e.Backend.Addr()).Hi
	value.Frontends = prefixWordsOf(value.To[:], e.To[:])
	value.Accepted = prefixWordsOf(value.From[:], e.From[:])
	if n := value.Frontends; n&(n-1) != 0 {
		return mapEntry{}, fmt.Errorf("%d frontends are not a power of two", n)
	}
	return newMapEntry(m, e.ID, value), nil
}

// prefixWordsOf writes the upper halves of the valid prefixes, and returns their number.
func prefixWordsOf(words []uint64, all []netip.Prefix) (n uint32) {
	for _, p := range all {
		if p.IsValid() {
			words[n] = bpfobj.ToAddr(p.Addr()).Hi
			n++
		}
	}
	return n
}

func translationEntry(
	m *ebpf.Map,
	vni pipeline.VNI,
	from netip.Addr,
	toVNI pipeline.VNI,
	to netip.Addr,
) (mapEntry, error) {
	if err := errors.Join(valid(vni, from), valid(toVNI, to)); err != nil {
		return mapEntry{}, err
	}
	if from.Is4() != to.Is4() {
		return mapEntry{}, errors.New("one address is IPv4 and the other IPv6")
	}
	return newMapEntry(
		m,
		addrKey(from, vni),
		bpfobj.PilasterTranslation{Address: bpfobj.ToAddr(to), Vni: uint32(toVNI)},
	), nil
}

func valid(vni pipeline.VNI, a netip.Addr) error {
	if vni > pipeline.MaxVNI {
		return fmt.Errorf("VNI %d has more than 24 bits", vni)
	}
	if !a.IsValid() || a.Is4In6() || a.Zone() != "" {
		return fmt.Errorf("%v is not an IPv4 or IPv6 address", a)
	}
	return nil
}

func newMapEntry(m *ebpf.Map, key, value any) mapEntry {
	return mapEntry{m, marshal(key), marshal(value)}
}

// marshal returns a value as the programs lay it out: without padding.
func marshal(v any) []byte {
	b, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		panic(err) // only of a type that has no fixed size
	}
	return b
}

func unmarshal[T any](b []byte) (v T, err error) {
	_, err = binary.Decode(b, binary.NativeEndian, &v)
	return v, err
}

// The functions below reverse encode.

func decodePeer(key, _ []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterPeerKey](key)
	return pipeline.Peer{Nodes: netip.PrefixFrom(k.Node.Addr(), int(k.Bits))}, err
}

func decodeSender(key, value []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterSenderKey](key)
	v, err2 := unmarshal[bpfobj.PilasterSender](value)
	return pipeline.Sender{
		Port: pipeline.Port(
			k.Port,
		), Address: unscoped(k.Source, k.Scope), VNI: pipeline.VNI(v.Vni), Identity: uint16(v.Identity),
	}, errors.Join(err, err2)
}

func decodeForeign(key, value []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterRemoteSenderKey](key)
	v, err2 := unmarshal[bpfobj.PilasterRemoteSender](value)
	theirs, source := scopedPrefix(
		bpfobj.PilasterScopedPrefix{Bits: k.Bits - address.NodeBits, Scope: k.Scope, Address: k.Source},
	)
	edge := netip.PrefixFrom(bpfobj.PilasterAddr{Hi: k.Edge}.Addr(), address.NodeBits)
	if a := (bpfobj.PilasterAddr{Lo: k.Edge}).Addr(); a.Is4In6() {
		edge = netip.PrefixFrom(a.Unmap(), 32)
	}
	return pipeline.Foreign{
			Edge:   edge,
			Theirs: theirs,
			Source: source,
			VNI:    pipeline.VNI(v.Vni),
		}, errors.Join(
			err,
			err2,
		)
}

func decodeOutside(key, _ []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterScopedPrefix](key)
	vni, to := scopedPrefix(k)
	return pipeline.NorthSouth{VNI: vni, To: to}, err
}

func decodeDNAT(key, value []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterScopedAddr](key)
	v, err2 := unmarshal[bpfobj.PilasterTranslation](value)
	_, vni := scopeFrom(k.Scope)
	return pipeline.DNAT{
		VNI: vni, Virtual: unscoped(k.Address, k.Scope), RealVNI: pipeline.VNI(v.Vni), Real: unscoped(v.Address,
			k.Scope),
	}, errors.Join(err, err2)
}

func decodeSNAT(key, value []byte) (pipeline.Entry, error) {
	e, err := decodeDNAT(key, value)
	d := e.(pipeline.DNAT)
	return pipeline.SNAT{VNI: d.VNI, Real: d.Virtual, Virtual: d.Real}, err
}

func decodeForward(key, value []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterScopedPrefix](key)
	v, err2 := unmarshal[bpfobj.PilasterRoute](value)
	vni, to := scopedPrefix(k)
	f := pipeline.Forward{VNI: vni, To: to, Port: pipeline.Port(v.Port)}
	switch f.Port {
	case pipeline.VXLAN:
		f.VTEP, f.Outside = v.Vtep.Addr(), v.Outside != 0
		if a := (bpfobj.PilasterAddr{Lo: v.Vtep.Lo}).Addr(); a.Is4In6() {
			f.VTEP, f.Wire, f.MAC = a.Unmap(), pipeline.VNI(v.Ifindex), macFrom(v.Vtep)
		} else {
			f.Offload, f.Relays = v.Ifindex&^routeRelays, v.Ifindex&routeRelays != 0
		}
	case 0, pipeline.Gateway:
	default:
		f.MAC = macFrom(v.Vtep)
	}
	return f, errors.Join(err, err2)
}

func decodeReplication(key, value []byte) (pipeline.Entry, error) {
	vni, err := unmarshal[uint32](key)
	v, err2 := unmarshal[bpfobj.PilasterReplication](value)
	var all []netip.Addr
	for _, is := range v.Vteps[:min(int(v.Count), len(v.Vteps))] {
		all = append(all, netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, is))))
	}
	return pipeline.NewReplication(pipeline.VNI(vni), all), errors.Join(err, err2)
}

// macWords returns a MAC as a route to a container has it: in the first bytes of the tunnel address, which it does not
// use. Builds before there were such MACs write zeros there, and ignore them.
func macWords(m pipeline.MAC) bpfobj.PilasterAddr {
	var b [16]byte
	copy(b[:], m[:])
	return bpfobj.ToAddr(netip.AddrFrom16(b))
}

// macFrom reverses macWords.
func macFrom(a bpfobj.PilasterAddr) (m pipeline.MAC) {
	b := a.Addr().As16()
	return pipeline.MAC(b[:len(m)])
}

func scopedPrefix(k bpfobj.PilasterScopedPrefix) (pipeline.VNI, netip.Prefix) {
	is4, vni := scopeFrom(k.Scope)
	bits := int(k.Bits) - scopeBits
	if is4 {
		bits -= 96
	}
	return vni, netip.PrefixFrom(unscoped(k.Address, k.Scope), bits)
}

func unscoped(a bpfobj.PilasterAddr, scope uint32) netip.Addr {
	if is4, _ := scopeFrom(scope); is4 {
		return a.Addr().Unmap()
	}
	return a.Addr()
}

func nodeOf(word uint64) netip.Prefix {
	return netip.PrefixFrom(bpfobj.PilasterAddr{Hi: word}.Addr(), address.NodeBits)
}

func decodeOffload(key, value []byte) (pipeline.Entry, error) {
	id, err := unmarshal[uint32](key)
	v, err2 := unmarshal[bpfobj.PilasterOffload](value)
	e := pipeline.Offload{
		ID: id, VNI: pipeline.VNI(v.Vni), Backend: nodeOf(v.Backend), Epoch: v.Epoch, Fronts: v.Fronts != 0,
	}
	for i := range min(int(v.Frontends), len(v.To)) {
		e.To[i] = nodeOf(v.To[i])
	}
	for i := range min(int(v.Accepted), len(v.From)) {
		e.From[i] = nodeOf(v.From[i])
	}
	return e, errors.Join(err, err2)
}

func decodeBackend(key, value []byte) (pipeline.Entry, error) {
	vni, err := unmarshal[uint32](key)
	v, err2 := unmarshal[bpfobj.PilasterBackend](value)
	return pipeline.Backend{VNI: pipeline.VNI(vni), Offload: v.Offload, Asks: v.Asks != 0}, errors.Join(err, err2)
}

func decodeFronted(key, value []byte) (pipeline.Entry, error) {
	k, err := unmarshal[bpfobj.PilasterScopedAddr](key)
	v, err2 := unmarshal[bpfobj.PilasterFronted](value)
	_, vni := scopeFrom(k.Scope)
	return pipeline.Fronted{
		VNI: vni, Address: unscoped(k.Address, k.Scope), Offload: v.Offload, App: uint16(v.App),
	}, errors.Join(err, err2)
}
