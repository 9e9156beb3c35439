package control

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/agenttest"
)

// keep runs the member's background tasks until stop is called.
func (m *member) keep() (stop func()) {
	ctx, cancel := context.WithCancel(m.T.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); m.Run(ctx) }()
	return func() { cancel(); <-ended }
}

// frontends describes what a node's packet path has of services: "address:port: node/index ...".
func (m *member) frontends() string {
	var all []string
	for key, f := range m.Driver.Frontends.All() {
		var backends []string
		for _, e := range f.Backends {
			p := address.Split(e.Plain)
			backends = append(backends, fmt.Sprintf("%d/%d", address.DefaultPlan().NodeNumber(p.Node), p.Index))
		}
		slices.Sort(backends)
		all = append(all, strings.Join(append([]string{key.Address.String() + ":"}, backends...), " "))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// endpoint returns how frontends names a container.
func (m *member) endpoint(container string) string {
	r, _ := m.Store.Find(container, "eth0")
	p := address.Split(r.Attachments[0].Plaintext)
	return fmt.Sprintf("%d/%d", address.DefaultPlan().NodeNumber(p.Node), p.Index)
}

// TestServicesOfACluster: the nodes that host a tenant have its services with the containers of all of them, after
// each change; others have nothing. What a node has in its packet path stays while its agent restarts.
func TestServicesOfACluster(t *testing.T) {
	c := newCluster(t)
	c.createTenant("blue")
	n1 := c.boot(t.TempDir(), "n1", agenttest.NewDriver())
	dir, driver := t.TempDir(), agenttest.NewDriver()
	n2 := c.boot(dir, "n2", driver)
	n3 := c.boot(t.TempDir(), "n3", agenttest.NewDriver())
	for _, m := range []*member{n1, n2, n3} {
		m.until(connected)
	}
	defer n1.keep()()
	defer n3.keep()()
	restart := n2.keep()
	until := func(want ...string) {
		t.Helper()
		slices.Sort(want)
		text := strings.Join(append([]string{"[fd70:696c:7300:1::1]:80:"}, want...), " ")
		agenttest.Eventually(t, func() error {
			has := [...]string{n1.frontends(), n2.frontends(), n3.frontends()}
			if want := [...]string{text, text, ""}; has != want {
				return fmt.Errorf("the nodes have %q, want %q", has, want)
			}
			return nil
		})
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	n1.MustAdd("c1")
	n2.MustAdd("c2")
	_, err := c.op.CreateService(t.Context(), connect.NewRequest(&pilasterv1.CreateServiceRequest{
		Service: &pilasterv1.Service{
			Tenant: "blue", Name: "web", Ports: []*pilasterv1.ServicePort{{Protocol: "TCP", Port: 80, Target: 8080}},
			Selector: map[string]string{"app": "web"},
		},
	}))
	must(err)
	c1, c2 := n1.endpoint("c1"), n2.endpoint("c2")
	until(c1, c2)

	// Changes on one node.
	n2.MustAdd("c3")
	until(c1, c2, n2.endpoint("c3"))
	_, err = n2.Label(t.Context(), "c3", agent.LabelChange{Set: map[string]string{"app": "db"}})
	must(err)
	until(c1, c2)
	_, err = n2.Label(t.Context(), "c3", agent.LabelChange{Set: map[string]string{"app": "web"}})
	must(err)
	until(c1, c2, n2.endpoint("c3"))
	must(n2.Delete(t.Context(), "c3", "eth0"))
	until(c1, c2)

	// An agent that restarts.
	restart()
	n2.stop()
	stays := n2.frontends()
	must(n1.Delete(t.Context(), "c1", "eth0"))
	n1.MustAdd("c4")
	if now := n2.frontends(); now != stays {
		t.Errorf("without an agent n2 has %q, and had %q", now, stays)
	}
	n2 = c.boot(dir, "n2", driver)
	restart = n2.keep()
	n2.until(connected)
	until(n1.endpoint("c4"), c2)
	if s := n2.Services(false); s.Services != 1 || s.Endpoints != 2 || s.Own != 1 || len(s.Problems) > 0 {
		t.Errorf("status %+v", s)
	}

	// A node that hosts the tenant no more.
	must(n2.Delete(t.Context(), "c2", "eth0"))
	agenttest.Eventually(t, func() error {
		want := "[fd70:696c:7300:1::1]:80: " + n1.endpoint("c4")
		if at1, at2 := n1.frontends(), n2.frontends(); at1 != want || at2 != "" {
			return fmt.Errorf("n1 has %q, n2 %q; want %q, and none on n2", at1, at2, want)
		}
		return nil
	})
	n2.MustAdd("c5")
	if n2.frontends() == "" {
		t.Error("the ADD of the first container did not wait for the services of its tenant")
	}
	until(n1.endpoint("c4"), n2.endpoint("c5"))
	restart()
}
