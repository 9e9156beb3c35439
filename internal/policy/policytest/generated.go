package policytest

import (
	"fmt"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"pilaster.io/pilaster/internal/address"
)

// Generated returns all steps of all cases that cyclonus generates, with all its probes. A pod's address is prefix
// ("192.168.1." or "fd00:1::") and a number.
func Generated(prefix string) (cases []Case, err error) {
	begin := func() *world {
		given := 0
		return newWorld(func(string) string {
			given++
			return fmt.Sprint(prefix, given)
		})
	}
	err = steps(prefix+"9", begin, func(name string, w *world, config *generator.ProbeConfig) error {
		c, err := w.probe(name, config)
		cases = append(cases, c)
		return err
	})
	return cases, err
}

// steps runs through all cases of cyclonus, each in a new world. The IP block of its policies contains the last pod.
func steps(
	last string,
	begin func() *world,
	then func(name string, w *world, config *generator.ProbeConfig) error,
) error {
	for _, tc := range generator.NewTestCaseGenerator(true, last, namespaces, nil, nil).GenerateAllTestCases() {
		w := begin()
		for i, step := range tc.Steps {
			name := fmt.Sprintf("%s, step %d", tc.Description, i+1)
			for _, action := range step.Actions {
				if err := w.apply(action); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
			if err := then(name, w, step.Probe); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

var namespaces = []string{"x", "y", "z"}

// world is the state that cyclonus would keep in its cluster.
type world struct {
	*probe.Resources
	policies []*networkingv1.NetworkPolicy
	address  func(pod string) string // the address of a new pod
	altered  bool                    // pods or namespaces differ from the initial ones
}

// newWorld has the initial pods of cyclonus: a, b and c in x, y and z, each with the ports 80 and 81.
func newWorld(address func(pod string) string) *world {
	w := &world{Resources: &probe.Resources{Namespaces: map[string]map[string]string{}}, address: address}
	for _, ns := range namespaces {
		w.Namespaces[ns] = withName(ns, map[string]string{"ns": ns})
		for _, name := range []string{"a", "b", "c"} {
			pod := probe.NewDefaultPod(
				ns,
				name,
				[]int{80, 81},
				[]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP},
				false,
				"",
			)
			pod.IP = address(pod.PodString().String())
			w.Pods = append(w.Pods, pod)
		}
	}
	return w
}

func (w *world) apply(a *generator.Action) (err error) {
	r := w.Resources
	if a.CreatePolicy == nil && a.UpdatePolicy == nil && a.DeletePolicy == nil && a.ReadNetworkPolicies == nil {
		w.altered = true
	}
	switch {
	case a.CreatePolicy != nil:
		w.policies = append(w.policies, a.CreatePolicy.Policy)
	case a.UpdatePolicy != nil:
		p := a.UpdatePolicy.Policy
		w.remove(p.Namespace, p.Name)
		w.policies = append(w.policies, p)
	case a.DeletePolicy != nil:
		w.remove(a.DeletePolicy.Namespace, a.DeletePolicy.Name)
	case a.CreateNamespace != nil:
		r, err = r.CreateNamespace(
			a.CreateNamespace.Namespace,
			withName(a.CreateNamespace.Namespace, a.CreateNamespace.Labels),
		)
	case a.SetNamespaceLabels != nil:
		r, err = r.UpdateNamespaceLabels(
			a.SetNamespaceLabels.Namespace,
			withName(a.SetNamespaceLabels.Namespace, a.SetNamespaceLabels.Labels),
		)
	case a.DeleteNamespace != nil:
		r, err = r.DeleteNamespace(a.DeleteNamespace.Namespace)
	case a.CreatePod != nil:
		if r, err = r.CreatePod(a.CreatePod.Namespace, a.CreatePod.Pod, a.CreatePod.Labels); err == nil {
			last := r.Pods[len(r.Pods)-1]
			last.IP = w.address(last.PodString().String())
		}
	case a.SetPodLabels != nil:
		r, err = r.SetPodLabels(a.SetPodLabels.Namespace, a.SetPodLabels.Pod, a.SetPodLabels.Labels)
	case a.DeletePod != nil:
		r, err = r.DeletePod(a.DeletePod.Namespace, a.DeletePod.Pod)
	case a.ReadNetworkPolicies != nil: // only reads the policies
	default:
		err = fmt.Errorf("an action of cyclonus that is not known: %+v", a)
	}
	w.Resources = r
	return err
}

func (w *world) remove(namespace, name string) {
	var left []*networkingv1.NetworkPolicy
	for _, p := range w.policies {
		if p.Namespace != namespace || p.Name != name {
			left = append(left, p)
		}
	}
	w.policies = left
}

func (w *world) probe(name string, config *generator.ProbeConfig) (Case, error) {
	b, err := begin(name, w.policies)
	if err != nil {
		return Case{}, err
	}
	apps := map[string]address.AppID{}
	for _, p := range w.Pods {
		apps[p.PodString().String()] = b.app(p, w.Namespaces[p.Namespace])
	}
	for _, job := range (&probe.JobBuilder{}).GetJobsForProbeConfig(w.Resources, config).Valid {
		if err := b.ask(job.Traffic(), apps[job.FromKey], apps[job.ToKey]); err != nil {
			return Case{}, err
		}
	}
	return b.Case, nil
}
