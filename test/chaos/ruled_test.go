package chaos_test

import (
	"encoding/json"
	"fmt"
	"strings"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// ruling are the names of a tenant's policies. At any time, a tenant has all of them with one value, or none.
var ruling = []string{"db", "web"}

const values = 3 // number of distinct values

// ruledBy returns the documents of all policies with the given value.
func ruledBy(value string) (documents []string) {
	for _, name := range ruling {
		documents = append(documents, fmt.Sprintf("{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: "+
			"{name: %s, labels: {value: v%s}}, spec: {podSelector: {}}}", name, value))
	}
	return documents
}

// ruledAs returns the value of a stored policy.
func ruledAs(p *pilasterv1.Policy) (string, error) {
	var document struct {
		Metadata struct{ Labels map[string]string }
	}
	if err := json.Unmarshal([]byte(p.Document), &document); err != nil {
		return "", err
	}
	return strings.TrimPrefix(document.Metadata.Labels["value"], "v"), nil
}

// changesOf returns how a call changed the policies, as one word if it changed all of them in the same way.
func changesOf(applied []*pilasterv1.AppliedPolicy) string {
	var words []string
	for i, p := range applied {
		if i == 0 || p.Change != applied[0].Change {
			words = append(words, strings.ToLower(strings.TrimPrefix(p.Change.String(), "POLICY_CHANGE_")))
		}
	}
	return strings.Join(words, " and ")
}

// ruledState is whether a tenant exists, and the value of its policies. The value is empty if the tenant has no
// policies.
type ruledState struct {
	there bool
	value string
}

func (j *judgement) ruledHistory(name string, log []entry) {
	var calls []call[ruledState]
	for _, e := range log {
		calls = append(calls, call[ruledState]{e.Asked, e.Answered, e.Outcome == unknown, e.Ask + e.Label, e.ruled})
	}
	end := ruledState{j.tenants[name] != nil, j.policies[name][ruling[0]]}
	for _, p := range ruling {
		if is := j.policies[name][p]; is != end.value {
			j.say("policies of tenant %s that are applied together are %v:%s", name, j.policies[name], history(log))
		}
	}
	if !linearizable(calls, ruledState{}, func(s ruledState) bool { return s == end }) {
		j.say("no order of the calls for tenant %s explains their results and the final state %+v:%s", name, end,
			history(log))
	}
}

func (e entry) ruled(s ruledState) (ruledState, bool) {
	switch e.Ask {
	case create:
		return step(e, s, ruledState{there: true}, !s.there)
	case destroy:
		return step(e, s, ruledState{}, s.there)
	case rule:
		change := "configured"
		switch s.value {
		case "":
			change = "created"
		case e.Label:
			change = "unchanged"
		}
		return step(e, s, ruledState{true, e.Label}, s.there && (e.Outcome != done || e.Change == change))
	default:
		return step(e, s, ruledState{there: true}, s.value != "")
	}
}
