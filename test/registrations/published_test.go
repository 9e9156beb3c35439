package registrations_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/address"
)

// resting is how long an address of a publication that ended is nobody's.
const resting = 5 * time.Minute

// publications looks for addresses that were given to two, and for what of the store does not go together.
func (j *judgement) publications(log []entry) {
	given := map[string]entry{}
	for _, e := range slices.SortedFunc(slices.Values(log), func(a, b entry) int { return int(a.Asked - b.Asked) }) {
		if e.Ask != publish || e.Outcome != done {
			continue
		}
		if before, taken := given[e.Underlay]; taken && e.Answered-before.Asked < resting {
			j.say("address %s was given to %s, and before it could have rested to %s", e.Underlay, before.Name, e.Name)
		}
		given[e.Underlay] = e
	}
	has := map[string]bool{}
	for name, t := range j.tenants {
		for _, p := range t.Publications {
			at := fmt.Sprintf("%s/%d", p.Node, address.Split(netip.MustParseAddr(p.Underlay)).Index)
			if has[at] = true; j.final.published[at] != name {
				j.say("tenant %s is published at %s, which the store says is of %q", name, at, j.final.published[at])
			}
		}
	}
	for at, name := range j.final.published {
		if !has[at] {
			j.say("the store says that %s is of %s, which is not published there", at, name)
		}
	}
}

// publishedState is whether a tenant is there, and published.
type publishedState struct{ there, published bool }

func (j *judgement) publishedHistory(name string, log []entry) {
	var calls []call[publishedState]
	for _, e := range log {
		if e.Ask == publish && e.Outcome == refused && strings.Contains(e.Error, "no node") {
			continue // the node was not there yet
		}
		calls = append(calls, call[publishedState]{e.Asked, e.Answered, e.Outcome == unknown, e.Ask, e.published})
	}
	t := j.tenants[name]
	end := publishedState{t != nil, len(t.GetPublications()) > 0}
	if !linearizable(calls, publishedState{}, func(s publishedState) bool { return s == end }) {
		j.say("no order of the calls about tenant %s gives their answers and %+v in the end:%s", name, end, history(log))
	}
}

func (e entry) published(s publishedState) (publishedState, bool) {
	switch e.Ask {
	case create:
		return step(e, s, publishedState{there: true}, !s.there)
	case destroy:
		return step(e, s, publishedState{}, s.there)
	case publish:
		return step(e, s, publishedState{true, true}, s.there && !s.published)
	default:
		return step(e, s, publishedState{there: true}, s.published)
	}
}
