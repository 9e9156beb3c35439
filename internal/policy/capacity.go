package policy

import (
	"context"
	"fmt"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/tenant"
)

// Room is how many entries of each table one tenant may have on a node with default settings: half of the table,
// because a tenant may not take more than it leaves free.
const Room = 1 << 17

// Fit rejects policies that no node could enforce, before they are stored: policies that cannot be compiled for one
// app, or that need more entries than nodes have. It compiles the tables of each app that a changed policy selects,
// app by app, and separately each changed policy that selects no app yet. together means that each node has the tables
// of all apps, because nodes also apply the egress policies of remote containers; then Fit compiles all apps into one
// set of tables. most is the number of entries that a table has room for; it is at least Room.
func Fit(
	ctx context.Context,
	name string,
	policies []Policy,
	changed func(*Policy) bool,
	apps map[address.AppID]map[string]string,
	together bool,
	most int,
) error {
	c, err := newCompiler(name, policies, NewIndex(apps))
	if err != nil {
		return err
	}
	c.most = min(most, maxEntries)
	called := func(at int) string {
		if at == c.index.unknown() {
			return "all containers"
		}
		return fmt.Sprintf("app %d (%s)", c.appAt(at), tenant.Canonical(apps[c.appAt(at)]))
	}
	concerned := c.index.empty()
	for i, p := range c.policies {
		if !changed(p) {
			continue
		}
		those := c.index.selected(p.Subject)
		// The policy selects no app yet. It is checked alone, so that a container that it selects can start later.
		if concerned.or(those); !those.any() {
			var alone selection
			alone.add(i, p)
			if _, err := c.subject(c.index.unknown(), alone); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
			c.clear()
		}
	}
	var places []int
	// Unknown apps come first: policies that select all containers select them too.
	for at := c.index.unknown(); at >= 0; at-- {
		if together || concerned.has(at) {
			places = append(places, at)
		}
	}
	selecting, fitted := c.selecting(places), map[string]bool{}
	for i, at := range places {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf(
				"the check whether nodes have room for the policies did not end in time: %w; apply fewer policies at "+
					"once, or set a higher --timeout",
				err,
			)
		}
		key := ""
		for _, d := range directions {
			key += c.inputsKey(d, selecting[i][d].enforced, at) + c.inputsKey(d, selecting[i][d].all, at)
		}
		if fitted[key] {
			continue
		}
		fitted[key] = true
		if !together {
			c.clear()
		}
		if _, err := c.subject(at, selecting[i]); err != nil {
			return fmt.Errorf("the policies that select %s: %w", called(at), err)
		}
	}
	return nil
}
