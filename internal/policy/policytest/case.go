package policytest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	networkingv1 "k8s.io/api/networking/v1"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

// A Case is policies of a tenant, its apps, and packets with the verdicts they are to get.
type Case struct {
	Name     string
	Policies []policy.Policy
	Apps     map[address.AppID]map[string]string
	Queries  []Query
}

// A Query is the arguments of policy.Tables.Decide and what it is to answer.
type Query struct {
	Subject   address.AppID
	Direction policy.Direction
	Remote    address.AppID
	Address   netip.Addr // of the remote
	Protocol  uint8
	Port      uint16
	Allowed   bool
}

var protocols = map[string]uint8{"TCP": policy.TCP, "UDP": policy.UDP, "SCTP": policy.SCTP}

// builder makes one case.
type builder struct {
	Case
	judge   *matcher.Policy
	numbers map[string]address.AppID // by identity
}

// begin has the policies read as a person's file would be.
func begin(name string, policies []*networkingv1.NetworkPolicy) (*builder, error) {
	b := &builder{
		Case:    Case{Name: name, Apps: map[address.AppID]map[string]string{}},
		judge:   matcher.BuildNetworkPolicies(false, policies),
		numbers: map[string]address.AppID{},
	}
	if len(policies) == 0 {
		return b, nil
	}
	var items []*networkingv1.NetworkPolicy
	for _, p := range policies {
		p = p.DeepCopy()
		p.APIVersion, p.Kind = "networking.k8s.io/v1", "NetworkPolicy"
		items = append(items, p)
	}
	text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
	if err != nil {
		return nil, err
	}
	if b.Policies, err = policy.Parse(text); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return b, nil
}

// app is that of a pod: the identity says all that cyclonus knows of it.
func (b *builder) app(p *probe.Pod, namespaceLabels map[string]string) address.AppID {
	labels := maps.Clone(p.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[tenant.NamespaceKey] = p.Namespace
	for k, v := range namespaceLabels {
		labels[tenant.NamespaceLabelKey(k)] = v
	}
	for _, c := range p.Containers {
		key, value := tenant.NamedPort(c.PortName, uint16(c.Port), string(c.Protocol))
		labels[key] = value
	}
	identity := tenant.Canonical(labels)
	if _, known := b.numbers[identity]; !known {
		b.numbers[identity] = address.AppID(len(b.numbers) + 1)
		b.Apps[b.numbers[identity]] = labels
	}
	return b.numbers[identity]
}

// ask adds what both ends are asked about a packet. The app of who is no pod is policy.Outside; it is not asked.
func (b *builder) ask(t *matcher.Traffic, source, destination address.AppID) error {
	from, err := netip.ParseAddr(t.Source.IP)
	if err != nil {
		return err
	}
	to, err := netip.ParseAddr(t.Destination.IP)
	if err != nil {
		return err
	}
	q := Query{Protocol: protocols[string(t.Protocol)], Port: uint16(t.ResolvedPort)}
	if source != policy.Outside {
		q.Subject, q.Direction, q.Remote, q.Address = source, policy.Egress, destination, to
		q.Allowed = b.judge.IsIngressOrEgressAllowed(t, false).IsAllowed()
		b.Queries = append(b.Queries, q)
	}
	if destination != policy.Outside {
		q.Subject, q.Direction, q.Remote, q.Address = destination, policy.Ingress, source, from
		q.Allowed = b.judge.IsIngressOrEgressAllowed(t, true).IsAllowed()
		b.Queries = append(b.Queries, q)
	}
	return nil
}

// withName are a namespace's labels with the one that Kubernetes gives it.
func withName(namespace string, labels map[string]string) map[string]string {
	all := map[string]string{"kubernetes.io/metadata.name": namespace}
	maps.Copy(all, labels)
	return all
}

// inside tells whether a prefix is a part of another, and not all of it.
func inside(part, of string) bool {
	p, o := netip.MustParsePrefix(part), netip.MustParsePrefix(of)
	return p.Bits() > o.Bits() && o.Contains(p.Addr())
}
