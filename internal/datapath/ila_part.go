package datapath

import (
	"math"
	"net/netip"

	"pilaster.io/pilaster/internal/datapath/bpfobj"
)

// ilaPart has what the programs of all hooks must know of network ila, also on a node without it: no other packet may
// have addresses that only its containers have on the fabric. The rest of the network has an object file of its own.
func ilaPart() networkPart {
	return networkPart{constants: func(d *Datapath) map[string]any {
		prefix, mask := uint64(math.MaxUint64), uint64(0) // no address has it
		if ila, err := d.config.Plan.ILA(); err == nil {
			prefix, mask = prefixWords(ila.Prefix)
		}
		return map[string]any{bpfobj.PilasterVarIlaPrefix: prefix, bpfobj.PilasterVarIlaMask: mask}
	}}
}

// locator returns the locator of this node; false if it has none.
func (d *Datapath) locator() (netip.Prefix, bool) {
	ila, err := d.config.Plan.ILA()
	if err != nil {
		return netip.Prefix{}, false
	}
	locator, err := ila.Locator(d.config.NodePrefix)
	return locator, err == nil
}
