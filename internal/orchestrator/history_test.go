package orchestrator

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/rpc"
)

func changes(t *testing.T, c *join.Client, tenant string, after int64) (*pilasterv1.ListMappingsResponse, error) {
	t.Helper()
	resp, err := c.ListMappings(
		t.Context(),
		connect.NewRequest(&pilasterv1.ListMappingsRequest{Tenant: tenant, AfterRevision: after}),
	)
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

// inWords is what an answer has, in order: prefixes with their nodes, and with their keys where they are told.
func inWords(r *pilasterv1.ListMappingsResponse) string {
	var all []string
	for _, m := range r.Mappings {
		all = append(all, strings.TrimSpace(m.To+" "+m.Name+" "+m.Key))
	}
	for _, m := range r.EndedMappings {
		all = append(all, "not "+m.To)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// A node that asks is told what has changed since it asked the last time, before which it was given; its stream tells
// it nothing of that.
func TestChangedMappings(t *testing.T) {
	t.Parallel()
	s := start(t, testConfig(t))
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16"})
	createNimitz(t, s, "lime", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1, n2 := registered(t, s, testNode(1)), registered(t, s, testNode(2))
	resolve(t, n1, "green", "web")
	resolve(t, n2, "green", "web")
	resolve(t, n2, "lime", "web")
	f := follow(t, n1, &pilasterv1.FollowRequest{HostedTenants: []string{"green"}, WithoutMappings: true})
	f.next(t)
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	after := page.Revision
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, ""},
		{func() {
			allocate(t, n1, "green", "c1/eth0")
			allocate(t, n2, "green", "c2/eth0")
			allocate(t, n2, "lime", "")
		}, "10.0.0.2/32 n1 c1/eth0, 10.0.0.3/32 n2"},
		{func() {
			allocate(t, n2, "green", "c3/eth0")
			for _, key := range []string{"c2/eth0", "c3/eth0"} {
				if _, err := n2.Free(t.Context(), connect.NewRequest(&pilasterv1.FreeRequest{Tenant: "green", Key: key})); err != nil {
					t.Fatal(err)
				}
			}
		}, "not 10.0.0.3/32, not 10.0.0.4/32"},
	} {
		step.do()
		r, err := changes(t, n1, "green", after)
		if err != nil || inWords(r) != step.want || r.NextPageToken != "" || r.Revision < after {
			t.Errorf("step %d: %q at %d, %v; want %q", i, inWords(r), r.GetRevision(), err, step.want)
		}
		after = r.GetRevision()
	}
	resolve(t, n1, "green", "db")
	if d := f.next(t).GetDelta(); len(d.GetApps()) != 1 || len(d.GetMappings())+len(d.GetEndedMappings()) > 0 {
		t.Errorf("the stream tells %v", d)
	}

	_, err = changes(t, n1, "lime", after)
	wantCode(t, err, connect.CodePermissionDenied)
	for _, unknown := range []int64{1, after + 1000, -1} {
		_, err = changes(t, n1, "green", unknown)
		if wantCode(t, err, connect.CodeAborted); err != nil &&
			!strings.Contains(err.Error(), "begin with the first page") {
			t.Errorf("after revision %d: %v", unknown, err)
		}
	}
	_, err = n1.ListMappings(
		t.Context(),
		connect.NewRequest(
			&pilasterv1.ListMappingsRequest{Tenant: "green", AfterRevision: after, PageToken: "7:0a000002/32"},
		),
	)
	wantCode(t, err, connect.CodeInvalidArgument)
}

// Such a query is one of those of which a tenant has so many a second, and is counted apart.
func TestChangedMappingsAreThrottledAndCounted(t *testing.T) {
	t.Parallel()
	c := testConfig(t)
	c.Limits.Lists = 3
	s := start(t, c)
	createNimitz(t, s, "green", &pilasterv1.Overlay{Cidr: "10.0.0.0/16", NodeBits: 24})
	n1 := registered(t, s, testNode(1))
	resolve(t, n1, "green", "web")
	page, err := list(t, n1, "green")
	if err != nil {
		t.Fatal(err)
	}
	answered, refused := 0, 0
	for range 12 {
		if _, err := changes(t, n1, "green", page.Revision); err != nil {
			wantCode(t, err, connect.CodeResourceExhausted)
			refused++
		} else {
			answered++
		}
	}
	if refused == 0 {
		t.Error("13 queries at once are not too many")
	}
	wantRefusals(t, s, admission.LimitLists, refused)
	for event, want := range map[string]int{"": 1, rpc.EventChanges: answered} {
		if n := metric(t, s.config.RunDir, fmt.Sprintf("pilaster_orchestrator_messages_total{direction=%q,event=%q,procedure=%q}", rpc.Sent, event, pilasterv1connect.NodeServiceListMappingsProcedure)); n != want {
			t.Errorf("%d answers of kind %q are counted, want %d", n, event, want)
		}
	}
}
