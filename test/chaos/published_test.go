package chaos_test

import "strings"

// publishedState is whether a tenant exists, and whether it is published.
type publishedState struct{ there, published bool }

func (j *judgement) publishedHistory(name string, log []entry) {
	var calls []call[publishedState]
	for _, e := range log {
		if e.Ask == publish && e.Outcome == refused && strings.Contains(e.Error, "no node") {
			continue // the node did not exist yet
		}
		calls = append(calls, call[publishedState]{e.Asked, e.Answered, e.Outcome == unknown, e.Ask, e.published})
	}
	t := j.tenants[name]
	end := publishedState{t != nil, len(t.GetPublications()) > 0}
	if !linearizable(calls, publishedState{}, func(s publishedState) bool { return s == end }) {
		j.say("no order of the calls for tenant %s explains their results and the final state %+v:%s", name, end,
			history(log))
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
