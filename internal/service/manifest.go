package service

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"pilaster.io/pilaster/internal/manifest"
)

var (
	serviceKind = manifest.Kind{APIVersion: "v1", Name: "Service"}
	sliceKind   = manifest.Kind{APIVersion: "discovery.k8s.io/v1", Name: "EndpointSlice"}
)

// serviceLabel is the label of an EndpointSlice with the name of its service.
const serviceLabel = "kubernetes.io/service-name"

// ParseManifests reads Services and EndpointSlices in YAML or JSON, separated by lines "---" or in a List. It refuses
// fields that have no effect here, and so would mislead; metadata and status that a Kubernetes cluster adds are
// ignored. An address of an EndpointSlice is any address; it may be one that containers see.
func ParseManifests(text []byte) (services []Service, all []Slice, err error) {
	in := map[string]string{} // the document of each object
	n, err := manifest.Read(text, []manifest.Kind{serviceKind, sliceKind}, func(d manifest.Document) error {
		key := fmt.Sprintf("%s %s", d.Kind, Name{d.Metadata.Namespace, d.Metadata.Name})
		if before, twice := in[key]; twice {
			return fmt.Errorf("%s: %s is also in %s: leave one of them out", d.Where, key, before)
		}
		in[key] = d.Where
		if d.Is(sliceKind) {
			s, err := one(d, sliceDocument.slice)
			all = append(all, s)
			return cmp.Or(err, called(d, s.Check()))
		}
		s, err := one(d, serviceDocument.service)
		services = append(services, s)
		return cmp.Or(err, called(d, s.Check()))
	})
	if err != nil {
		return nil, nil, err
	}
	if n == 0 {
		return nil, nil, fmt.Errorf("no service in it: write documents of %v, and of %v for endpoints that no "+
			"selector selects", serviceKind, sliceKind)
	}
	return services, all, nil
}

// called adds to an error where the object is.
func called(d manifest.Document, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", d.Where, err)
}

// one reads the object of a document of type D.
func one[D, T any](d manifest.Document, convert func(D) (T, field.ErrorList)) (object T, err error) {
	var document D
	if err := manifest.Decode(d.JSON, &document); err != nil {
		return object, fmt.Errorf("%s: %w", d.Called(), err)
	}
	object, wrong := convert(document)
	if err := manifest.ErrorOf(wrong); err != nil {
		return object, fmt.Errorf("%s: %w", d.Called(), err)
	}
	return object, nil
}

// metadata has the fields that matter, and those that are ignored.
type metadata struct {
	Name      string            `json:"name"`
	Namespace string            `json:"namespace"`
	Labels    map[string]string `json:"labels"`

	Annotations       json.RawMessage `json:"annotations"`
	CreationTimestamp json.RawMessage `json:"creationTimestamp"`
	Generation        json.RawMessage `json:"generation"`
	Finalizers        json.RawMessage `json:"finalizers"`
	GenerateName      json.RawMessage `json:"generateName"`
	ManagedFields     json.RawMessage `json:"managedFields"`
	OwnerReferences   json.RawMessage `json:"ownerReferences"`
	ResourceVersion   json.RawMessage `json:"resourceVersion"`
	SelfLink          json.RawMessage `json:"selfLink"`
	UID               json.RawMessage `json:"uid"`
}

type serviceDocument struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   metadata        `json:"metadata"`
	Spec       serviceSpec     `json:"spec"`
	Status     json.RawMessage `json:"status"` // ignored
}

type serviceSpec struct {
	Type                     string            `json:"type"`
	Selector                 map[string]string `json:"selector"`
	Ports                    []portSpec        `json:"ports"`
	ClusterIP                string            `json:"clusterIP"`
	SessionAffinity          string            `json:"sessionAffinity"`
	SessionAffinityConfig    *affinitySpec     `json:"sessionAffinityConfig"`
	PublishNotReadyAddresses bool              `json:"publishNotReadyAddresses"`
	TrafficDistribution      string            `json:"trafficDistribution"`
	ExternalIPs              []string          `json:"externalIPs"`
	ExternalTrafficPolicy    string            `json:"externalTrafficPolicy"`
	LoadBalancerIP           string            `json:"loadBalancerIP"`

	// Without it only a nodePort in the document asks for node ports, unlike in Kubernetes.
	AllocateLoadBalancerNodePorts *bool `json:"allocateLoadBalancerNodePorts"`

	// A Kubernetes cluster adds these. They must have its defaults for IPv6.
	ClusterIPs            []string `json:"clusterIPs"`
	IPFamilies            []string `json:"ipFamilies"`
	IPFamilyPolicy        string   `json:"ipFamilyPolicy"`
	InternalTrafficPolicy string   `json:"internalTrafficPolicy"`

	// These are refused with what to do.
	ExternalName             json.RawMessage `json:"externalName"`
	HealthCheckNodePort      json.RawMessage `json:"healthCheckNodePort"`
	LoadBalancerClass        json.RawMessage `json:"loadBalancerClass"`
	LoadBalancerSourceRanges json.RawMessage `json:"loadBalancerSourceRanges"`
}

type portSpec struct {
	Name       string          `json:"name"`
	Protocol   string          `json:"protocol"`
	Port       int64           `json:"port"`
	TargetPort json.RawMessage `json:"targetPort"`
	NodePort   int64           `json:"nodePort"`

	AppProtocol json.RawMessage `json:"appProtocol"` // ignored: a hint for proxies of applications
}

type affinitySpec struct {
	ClientIP *struct {
		TimeoutSeconds *int64 `json:"timeoutSeconds"`
	} `json:"clientIP"`
}

const (
	headless     = "None"
	clientIP     = "ClientIP"
	nodePort     = "NodePort"
	loadBalancer = "LoadBalancer"
)

func (d serviceDocument) service() (s Service, wrong field.ErrorList) {
	spec, path := d.Spec, field.NewPath("spec")
	s = Service{
		Name:            Name{d.Metadata.Namespace, d.Metadata.Name},
		Selector:        spec.Selector,
		PublishNotReady: spec.PublishNotReadyAddresses,
		Headless:        spec.ClusterIP == headless,
		NodePorts:       spec.Type == nodePort,
		TrafficPolicy:   ParseTrafficPolicy(spec.ExternalTrafficPolicy),
		LoadBalancer:    spec.Type == loadBalancer,
	}
	choose := func(name, value string, valid ...string) {
		if value != "" && !slices.Contains(valid, value) {
			wrong = append(wrong, field.NotSupported(path.Child(name), value, valid))
		}
	}
	choose("type", spec.Type, "ClusterIP", nodePort, loadBalancer)
	choose("externalTrafficPolicy", spec.ExternalTrafficPolicy, Cluster.String(), Local.String())
	choose("sessionAffinity", spec.SessionAffinity, headless, clientIP)
	choose("ipFamilyPolicy", spec.IPFamilyPolicy, "SingleStack", "PreferDualStack")
	choose("internalTrafficPolicy", spec.InternalTrafficPolicy, "Cluster")
	for _, f := range spec.IPFamilies {
		choose("ipFamilies", f, "IPv6")
	}
	for i, a := range spec.ClusterIPs {
		if at := path.Child("clusterIPs").Index(i); a != spec.ClusterIP {
			wrong = append(wrong, field.Invalid(at, a, "must be clusterIP, and no other"))
		}
	}
	if a := spec.ClusterIP; a != "" && !s.Headless {
		var err error
		if s.Address, err = netip.ParseAddr(a); err != nil || !s.Address.Is6() || s.Address.Is4In6() {
			wrong = append(wrong, field.Invalid(path.Child("clusterIP"), a, "must be an IPv6 address or None"))
		}
	}
	for i, text := range spec.ExternalIPs {
		a, err := netip.ParseAddr(text)
		if err != nil {
			wrong = append(wrong, field.Invalid(path.Child("externalIPs").Index(i), text, "must be an IPv6 address"))
		}
		s.ExternalIPs = append(s.ExternalIPs, a)
	}
	wrong = append(wrong, forbid(path,
		unsupported{"externalName", spec.ExternalName, "names outside of the cluster are for a DNS server"},
		unsupported{"healthCheckNodePort", spec.HealthCheckNodePort, "routers learn by BGP which nodes to use"},
		unsupported{"loadBalancerClass", spec.LoadBalancerClass, "there is one kind of load balancer"},
		unsupported{"loadBalancerSourceRanges", spec.LoadBalancerSourceRanges, "use a NetworkPolicy with an ipBlock"},
	)...)
	for i, p := range spec.Ports {
		port, more := p.port(path.Child("ports").Index(i))
		s.Ports, wrong = append(s.Ports, port), append(wrong, more...)
	}
	more := spec.loadBalancer(path, &s)
	wrong = append(wrong, more...)
	s.Affinity, more = spec.affinity(path)
	wrong = append(wrong, more...)
	switch d := spec.TrafficDistribution; d {
	case "", string(PreferSameZone), string(PreferSameNode):
		s.Distribution = Distribution(d)
	case "PreferClose":
		s.Distribution = PreferSameZone
	default:
		choose("trafficDistribution", d, string(PreferSameZone), string(PreferSameNode), "PreferClose")
	}
	return s, wrong
}

// loadBalancer sets the load-balancer address, and whether a load balancer also has node ports.
func (spec serviceSpec) loadBalancer(path *field.Path, s *Service) (wrong field.ErrorList) {
	ports := spec.AllocateLoadBalancerNodePorts
	if !s.LoadBalancer {
		if spec.LoadBalancerIP != "" {
			wrong = append(wrong, field.Forbidden(path.Child("loadBalancerIP"), "only with type LoadBalancer"))
		}
		if ports != nil {
			wrong = append(wrong, field.Forbidden(path.Child("allocateLoadBalancerNodePorts"),
				"only with type LoadBalancer"))
		}
		return wrong
	}
	if text := spec.LoadBalancerIP; text != "" {
		var err error
		if s.LoadBalancerIP, err = netip.ParseAddr(text); err != nil {
			wrong = append(wrong, field.Invalid(path.Child("loadBalancerIP"), text, "must be an IPv6 address"))
		}
	}
	if ports != nil {
		s.NodePorts = *ports
	} else {
		s.NodePorts = slices.ContainsFunc(s.Ports, func(p Port) bool { return p.NodePort != 0 })
	}
	return wrong
}

func (p portSpec) port(path *field.Path) (port Port, wrong field.ErrorList) {
	number := func(at *field.Path, n int64) uint16 {
		if n < 1 || n > 65535 {
			wrong = append(wrong, field.Invalid(at, n, "must be between 1 and 65535"))
		}
		return uint16(n)
	}
	port = Port{Name: p.Name, Port: number(path.Child("port"), p.Port)}
	port.Target = port.Port
	if text := string(p.TargetPort); text != "" && text != "null" {
		var target int64
		if json.Unmarshal(p.TargetPort, &target) == nil {
			port.Target = number(path.Child("targetPort"), target)
		} else {
			wrong = append(wrong, field.Invalid(path.Child("targetPort"), strings.Trim(text, `"`),
				"must be a number: names of ports are not supported"))
		}
	}
	if p.NodePort < 0 || p.NodePort > 65535 { // 0 is none; Check knows the range
		wrong = append(wrong, field.Invalid(path.Child("nodePort"), p.NodePort,
			fmt.Sprintf("must be between %d and %d", FirstNodePort, LastNodePort)))
	}
	port.NodePort = uint16(p.NodePort)
	var err error
	if port.Protocol, err = ParseProtocol(p.Protocol); err != nil {
		wrong = append(wrong, field.NotSupported(path.Child("protocol"), p.Protocol, []string{"TCP", "UDP"}))
	}
	return port, wrong
}

func (spec serviceSpec) affinity(path *field.Path) (time.Duration, field.ErrorList) {
	c := spec.SessionAffinityConfig
	switch path := path.Child("sessionAffinityConfig"); {
	case spec.SessionAffinity != clientIP && c != nil:
		return 0, field.ErrorList{field.Forbidden(path, "only with sessionAffinity ClientIP")}
	case spec.SessionAffinity != clientIP:
		return 0, nil
	case c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil:
		return DefaultAffinity, nil
	case *c.ClientIP.TimeoutSeconds < 1 || *c.ClientIP.TimeoutSeconds > int64(MaxAffinity/time.Second):
		return 0, field.ErrorList{field.Invalid(path.Child("clientIP", "timeoutSeconds"), *c.ClientIP.TimeoutSeconds,
			"must be between 1 and 86400")}
	}
	return time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second, nil
}

type sliceDocument struct {
	APIVersion  string          `json:"apiVersion"`
	Kind        string          `json:"kind"`
	Metadata    metadata        `json:"metadata"`
	AddressType string          `json:"addressType"`
	Endpoints   []endpointSpec  `json:"endpoints"`
	Ports       json.RawMessage `json:"ports"` // only to explain that the service has them
}

type endpointSpec struct {
	Addresses []string `json:"addresses"`

	// These are refused with what to do.
	Hints    json.RawMessage `json:"hints"`
	Hostname json.RawMessage `json:"hostname"`
	NodeName json.RawMessage `json:"nodeName"`
	Zone     json.RawMessage `json:"zone"`

	Conditions struct {
		Ready       *bool `json:"ready"`
		Serving     *bool `json:"serving"`
		Terminating *bool `json:"terminating"`
	} `json:"conditions"`
	TargetRef *struct {
		Kind      string `json:"kind"`
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
		UID       string `json:"uid"`
	} `json:"targetRef"`
}

func (d sliceDocument) slice() (s Slice, wrong field.ErrorList) {
	s = Slice{Service: Name{d.Metadata.Namespace, d.Metadata.Labels[serviceLabel]}, Name: d.Metadata.Name}
	if s.Service.Name == "" {
		wrong = append(wrong, field.Required(field.NewPath("metadata", "labels").Key(serviceLabel),
			"the name of the service"))
	}
	if d.AddressType != "IPv6" {
		wrong = append(wrong, field.NotSupported(field.NewPath("addressType"), d.AddressType, []string{"IPv6"}))
	}
	wrong = append(wrong, forbid(nil, unsupported{"ports", d.Ports, "the targetPort of the service's ports counts"})...)
	for i, e := range d.Endpoints {
		path := field.NewPath("endpoints").Index(i)
		wrong = append(wrong, forbid(path,
			unsupported{"hints", e.Hints, "trafficDistribution of the service counts"},
			unsupported{"hostname", e.Hostname, "endpoints have no DNS names of their own"},
			unsupported{"nodeName", e.NodeName, "fixed endpoints are on no node"},
			unsupported{"zone", e.Zone, "fixed endpoints are in no zone"},
		)...)
		if len(e.Addresses) != 1 {
			wrong = append(wrong, field.Invalid(path.Child("addresses"), len(e.Addresses), "must be one address"))
			continue
		}
		a, err := netip.ParseAddr(e.Addresses[0])
		if err != nil {
			wrong = append(wrong, field.Invalid(path.Child("addresses").Index(0), e.Addresses[0],
				"must be an IPv6 address"))
			continue
		}
		is := Endpoint{Address: a, Terminating: e.Conditions.Terminating != nil && *e.Conditions.Terminating}
		// A terminating endpoint is never ready in Kubernetes, but may serve.
		is.NotReady = !orTrue(e.Conditions.Ready)
		if is.Terminating {
			is.NotReady = !orTrue(e.Conditions.Serving)
		}
		if e.TargetRef != nil {
			is.Name = e.TargetRef.Name
		}
		s.Endpoints = append(s.Endpoints, is)
	}
	return s, wrong
}

// unsupported is a field of Kubernetes that has no effect here.
type unsupported struct {
	name  string
	value json.RawMessage
	why   string
}

// forbid refuses those fields at a path that the document has.
func forbid(path *field.Path, fields ...unsupported) (wrong field.ErrorList) {
	for _, f := range fields {
		if len(f.value) > 0 && string(f.value) != "null" {
			wrong = append(wrong, field.Forbidden(path.Child(f.name), "not supported: "+f.why+"; leave it out"))
		}
	}
	return wrong
}

func orTrue(b *bool) bool { return b == nil || *b }
