package rpc

import (
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

// TestLoadWrites: an orchestrator records so many loads in a second, half of them only of nodes that report often.
func TestLoadWrites(t *testing.T) {
	s := &NodeService{LoadWrites: rate.NewLimiter(0, 10)}
	count := func(often bool) (n int) {
		for s.mayRecord(often) && n < 100 {
			n++
		}
		return n
	}
	if idle, often := count(false), count(true); idle != 6 || often != 4 {
		t.Errorf("%d reports of idle nodes, and %d of others", idle, often)
	}
	if s.LoadWrites = nil; !s.mayRecord(false) {
		t.Error("there is a limit")
	}
}

// Reports about offloads that no agent sends are refused before the store reads them.
func TestCheckOffloaded(t *testing.T) {
	many := &pilasterv1.OffloadedEndpoint{App: 1}
	for range tenant.MaxOffloaded/2 + 1 {
		many.Addresses = append(many.Addresses, []byte{10, 0, 0, 1})
	}
	for name, c := range map[string]struct {
		reports []*pilasterv1.Hosting
		valid   bool
	}{
		"none": {nil, true},
		"a container": {[]*pilasterv1.Hosting{
			{Offloaded: []*pilasterv1.OffloadedEndpoint{many}, LostFrontends: []string{"n1"}}}, true},
		"too many": {[]*pilasterv1.Hosting{
			{Offloaded: []*pilasterv1.OffloadedEndpoint{many}}, {Offloaded: []*pilasterv1.OffloadedEndpoint{many}},
		}, false},
		"no app": {[]*pilasterv1.Hosting{{Offloaded: []*pilasterv1.OffloadedEndpoint{
			{Addresses: [][]byte{{10, 0, 0, 1}}}}}}, false},
		"no address": {[]*pilasterv1.Hosting{{Offloaded: []*pilasterv1.OffloadedEndpoint{
			{Addresses: [][]byte{{10, 0, 0}}, App: 1}}}}, false},
		"no name":    {[]*pilasterv1.Hosting{{LostFrontends: []string{"N1\x1b"}}}, false},
		"nor answer": {[]*pilasterv1.Hosting{{AnsweringFrontends: []string{"N1\x1b"}}}, false},
		"many answer": {
			[]*pilasterv1.Hosting{{AnsweringFrontends: make([]string, tenant.MaxFrontends+1)}}, false,
		},
		"many names": {[]*pilasterv1.Hosting{{LostFrontends: make([]string, tenant.MaxFrontends+1)}}, false},
	} {
		if err := checkOffloaded(c.reports); (err == nil) != c.valid ||
			err != nil && connect.CodeOf(refusal(err)) != connect.CodeInvalidArgument {
			t.Errorf("%s: got %v, want valid: %v", name, err, c.valid)
		}
	}
}
