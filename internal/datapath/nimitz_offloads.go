package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/network/nimitz/pipeline"
	"pilaster.io/pilaster/internal/tenant"
)

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
