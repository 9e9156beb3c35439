package policytest

import (
	"fmt"
	"math/rand/v2"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"pilaster.io/pilaster/internal/policy"
)

// Random returns a random case: up to 12 policies, 12 pods, and traffic among them and with peers outside.
func Random(r *rand.Rand, traffics int) (Case, error) {
	d := dice{r}
	var policies []*networkingv1.NetworkPolicy
	for i := range r.IntN(13) {
		policies = append(policies, d.policy(fmt.Sprint("p", i)))
	}
	b, err := begin("random", policies)
	if err != nil {
		return Case{}, err
	}
	pods, namespaces := d.pods()
	for range traffics {
		from, to := pods[r.IntN(len(pods))], pods[r.IntN(len(pods))]
		switch r.IntN(6) {
		case 0:
			from = &probe.Pod{IP: d.address()}
		case 1:
			to = &probe.Pod{IP: d.address()}
		}
		t := &matcher.Traffic{
			Source:       end(from, namespaces),
			Destination:  end(to, namespaces),
			Protocol:     pick(r, someProtocols),
			ResolvedPort: pick(r, somePorts),
		}
		for _, c := range to.Containers {
			if c.Port == t.ResolvedPort && c.Protocol == t.Protocol {
				t.ResolvedPortName = c.PortName
			}
		}
		source, destination := policy.Outside, policy.Outside
		if from.Name != "" {
			source = b.app(from, namespaces[from.Namespace])
		}
		if to.Name != "" {
			destination = b.app(to, namespaces[to.Namespace])
		}
		if err := b.ask(t, source, destination); err != nil {
			return Case{}, err
		}
	}
	return b.Case, nil
}

func end(p *probe.Pod, namespaces map[string]map[string]string) *matcher.TrafficPeer {
	if p.Name == "" {
		return &matcher.TrafficPeer{IP: p.IP}
	}
	return &matcher.TrafficPeer{
		IP: p.IP,
		Internal: &matcher.InternalPeer{
			PodLabels:       p.Labels,
			NamespaceLabels: namespaces[p.Namespace],
			Namespace:       p.Namespace,
		},
	}
}

// The values that random cases are made of. There are few, so that policies and pods often match.
var (
	someNamespaces = []string{"x", "y", "default"}
	someValues     = []string{"a", "b", "c"}
	someProtocols  = []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}
	somePorts      = []int{1, 79, 80, 81, 82, 443, 8080, 65535}
	someNames      = []string{"http", "dns", "metrics"}
	someBlocks     = []string{
		"0.0.0.0/0",
		"10.0.0.0/8",
		"10.1.0.0/16",
		"10.1.2.0/24",
		"10.1.2.128/25",
		"::/0",
		"fd00::/16",
		"fd00:0:1::/48",
		"10.1.2.3/32",
	}
)

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

type dice struct{ *rand.Rand }

func (d dice) address() string {
	if d.IntN(3) == 0 {
		return fmt.Sprintf("fd00:0:%d::%d", d.IntN(3), d.IntN(4)+1)
	}
	return fmt.Sprintf("%d.%d.%d.%d", 10+d.IntN(2), d.IntN(3), d.IntN(4), pick(d.Rand, []int{3, 130, 9}))
}

func (d dice) pods() (pods []*probe.Pod, namespaces map[string]map[string]string) {
	namespaces = map[string]map[string]string{}
	for _, ns := range someNamespaces {
		namespaces[ns] = withName(ns, map[string]string{"team": pick(d.Rand, someValues)})
		if d.IntN(2) == 0 {
			namespaces[ns]["stage"] = pick(d.Rand, someValues)
		}
	}
	for i := range 12 {
		p := &probe.Pod{
			Namespace: pick(d.Rand, someNamespaces),
			Name:      fmt.Sprint("pod", i),
			IP:        d.address(),
			Labels:    map[string]string{"app": pick(d.Rand, someValues)},
		}
		if d.IntN(2) == 0 {
			p.Labels["tier"] = pick(d.Rand, someValues)
		}
		for _, name := range someNames {
			if d.IntN(2) == 0 {
				p.Containers = append(
					p.Containers,
					&probe.Container{
						PortName: name,
						Port:     pick(d.Rand, somePorts),
						Protocol: pick(d.Rand, someProtocols),
					},
				)
			}
		}
		p.Containers = onePerPort(p.Containers)
		pods = append(pods, p)
	}
	return pods, namespaces
}

// onePerPort keeps only one name for each port, because a packet of cyclonus can have only one port name.
func onePerPort(all []*probe.Container) (out []*probe.Container) {
	seen := map[string]bool{}
	for _, c := range all {
		if key := fmt.Sprint(c.Port, c.Protocol); !seen[key] {
			seen[key] = true
			out = append(out, c)
		}
	}
	return out
}

func (d dice) policy(name string) *networkingv1.NetworkPolicy {
	p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: pick(d.Rand, someNamespaces), Name: name}}
	p.Spec.PodSelector = *d.selector("app", "tier")
	p.Spec.PolicyTypes = pick(d.Rand, [][]networkingv1.PolicyType{{"Ingress"}, {"Egress"}, {"Ingress", "Egress"}})
	for range d.IntN(4) {
		p.Spec.Ingress = append(
			p.Spec.Ingress,
			networkingv1.NetworkPolicyIngressRule{From: d.peers(true), Ports: d.ports(true)},
		)
	}
	for range d.IntN(4) {
		named := d.IntN(2) == 0 // a rule with named ports has no IP blocks
		p.Spec.Egress = append(
			p.Spec.Egress,
			networkingv1.NetworkPolicyEgressRule{To: d.peers(!named), Ports: d.ports(named)},
		)
	}
	return p
}

// selector returns a random selector. always is a key that all pods have, so that cyclonus treats NotIn as Kubernetes
// does.
func (d dice) selector(always, sometimes string) *metav1.LabelSelector {
	s := &metav1.LabelSelector{}
	for range d.IntN(3) {
		switch d.IntN(5) {
		case 0:
			s.MatchLabels = map[string]string{pick(d.Rand, []string{always, sometimes}): pick(d.Rand, someValues)}
		case 1:
			s.MatchExpressions = append(
				s.MatchExpressions,
				metav1.LabelSelectorRequirement{
					Key:      sometimes,
					Operator: "In",
					Values:   []string{pick(d.Rand, someValues), pick(d.Rand, someValues)},
				},
			)
		case 2:
			s.MatchExpressions = append(
				s.MatchExpressions,
				metav1.LabelSelectorRequirement{
					Key:      always,
					Operator: "NotIn",
					Values:   []string{pick(d.Rand, someValues)},
				},
			)
		case 3:
			s.MatchExpressions = append(
				s.MatchExpressions,
				metav1.LabelSelectorRequirement{Key: sometimes, Operator: "Exists"},
			)
		case 4:
			s.MatchExpressions = append(
				s.MatchExpressions,
				metav1.LabelSelectorRequirement{Key: sometimes, Operator: "DoesNotExist"},
			)
		}
	}
	return s
}

func (d dice) peers(blocks bool) (peers []networkingv1.NetworkPolicyPeer) {
	for range d.IntN(4) {
		var p networkingv1.NetworkPolicyPeer
		switch kind := d.IntN(4); {
		case kind == 0 && blocks:
			p.IPBlock = &networkingv1.IPBlock{CIDR: pick(d.Rand, someBlocks)}
			for _, e := range someBlocks {
				if d.IntN(3) == 0 && inside(e, p.IPBlock.CIDR) {
					p.IPBlock.Except = append(p.IPBlock.Except, e)
				}
			}
		case kind == 1:
			p.PodSelector, p.NamespaceSelector = d.selector("app", "tier"), d.selector("team", "stage")
		case kind == 2:
			p.NamespaceSelector = d.selector("team", "stage")
		default:
			p.PodSelector = d.selector("app", "tier")
		}
		peers = append(peers, p)
	}
	return peers
}

func (d dice) ports(names bool) (ports []networkingv1.NetworkPolicyPort) {
	for range d.IntN(4) {
		protocol := pick(d.Rand, someProtocols)
		p := networkingv1.NetworkPolicyPort{Protocol: &protocol}
		first := int32(pick(d.Rand, somePorts))
		number, name := intstr.FromInt32(first), intstr.FromString(pick(d.Rand, someNames))
		switch kind := d.IntN(4); {
		case kind == 0:
		case kind == 1 && names:
			p.Port = &name
		case kind == 2:
			last := min(first+d.Int32N(400), 65535)
			p.Port, p.EndPort = &number, &last
		default:
			p.Port = &number
		}
		ports = append(ports, p)
	}
	return ports
}
