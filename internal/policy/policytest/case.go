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

// A Case holds the policies and apps of a tenant, and packets with their expected verdicts.
type Case struct {
	Name     string
	Policies []policy.Policy
	Apps     map[address.AppID]map[string]string
	Queries  []Query
}

// A Query holds the arguments of policy.Tables.Decide and the expected result.
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

// builder builds one case.
type builder struct {
	Case
	judge   *matcher.Policy
	numbers map[string]address.AppID // by identity
}

// begin serialises the policies and parses them like a user's file.
func begin(name string, policies []*networkingv1.NetworkPolicy) (*builder, error) {
	b := &builder{
		Case:    Case{Name: name, Apps: map[address.AppID]map[string]string{}},
		judge:   matcher.BuildNetworkPolicies(false, policies),
		numbers: map[string]address.AppID{},
	}
	for _, p := range policies {
		text, err := document(p)
		if err != nil {
			return nil, err
		}
		parsed, err := policy.Parse(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		b.Policies = append(b.Policies, parsed...)
	}
	return b, nil
}

// document returns a policy as a user would write it.
func document(p *networkingv1.NetworkPolicy) ([]byte, error) {
	p = p.DeepCopy()
	p.APIVersion, p.Kind = "networking.k8s.io/v1", "NetworkPolicy"
	return json.Marshal(p)
}

// app returns the app of a pod.
func (b *builder) app(p *probe.Pod, namespaceLabels map[string]string) address.AppID {
	labels := identity(p, namespaceLabels)
	key := tenant.Canonical(labels)
	if _, known := b.numbers[key]; !known {
		b.numbers[key] = address.AppID(len(b.numbers) + 1)
		b.Apps[b.numbers[key]] = labels
	}
	return b.numbers[key]
}

// identity returns the identity labels of a pod, from all that cyclonus knows of it.
func identity(p *probe.Pod, namespaceLabels map[string]string) map[string]string {
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
	return labels
}

// ask adds the queries of both ends of a packet. A peer that is no pod has the app policy.Outside and gets no query.
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

// withName returns a namespace's labels with the name label that Kubernetes adds.
func withName(namespace string, labels map[string]string) map[string]string {
	all := map[string]string{"kubernetes.io/metadata.name": namespace}
	maps.Copy(all, labels)
	return all
}

// inside reports whether prefix part lies within prefix of and is longer.
func inside(part, of string) bool {
	p, o := netip.MustParsePrefix(part), netip.MustParsePrefix(of)
	return p.Bits() > o.Bits() && o.Contains(p.Addr())
}
