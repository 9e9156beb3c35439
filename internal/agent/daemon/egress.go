package daemon

import (
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/egress"
)

// openEgress reads which container has which egress address. A node whose number is beyond the cluster's egress prefix
// has none.
func (d *daemon) openEgress(m state.Membership) (err error) {
	node, _ := m.Plan.EgressNode(m.Prefix)
	d.egress, err = egress.Open(egress.Config{Dir: d.StateDir, Node: node, Records: d.store.List(), Log: d.Log})
	return err
}
