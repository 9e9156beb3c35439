package daemon

import (
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/egress"
)

// openEgress reads which container has which egress address.
func (d *daemon) openEgress(m state.Membership) (err error) {
	d.egress, err = egress.Open(egress.Config{
		Dir: d.StateDir, Plan: m.Plan, Node: m.Prefix, Records: d.store.List(), Log: d.Log,
	})
	return err
}
