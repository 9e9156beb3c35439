package rpc

import (
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/tenant"
)

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
		"many names": {[]*pilasterv1.Hosting{{LostFrontends: make([]string, tenant.MaxFrontends+1)}}, false},
	} {
		if err := checkOffloaded(c.reports); (err == nil) != c.valid ||
			err != nil && connect.CodeOf(refusal(err)) != connect.CodeInvalidArgument {
			t.Errorf("%s: got %v, want valid: %v", name, err, c.valid)
		}
	}
}
