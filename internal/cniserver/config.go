package cniserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// Config is a network configuration with CNI_ARGS. Values that only one verb needs are checked by that verb: a DEL must
// succeed with the annotations for which an ADD was refused.
type Config struct {
	Network          string               // name of the CNI network
	Version          string               // of the spec
	Pod              string               // "namespace/name", or empty
	namespace        string               // of the pod, from CNI_ARGS; or empty
	ValidAttachments []types.GCAttachment // for GC
	file             fileConfig
}

// fileConfig is the network configuration from the runtime. containerd and CRI-O pass a pod's annotations to plugins
// with the capability io.kubernetes.cri.pod-annotations.
type fileConfig struct {
	types.PluginConf
	Tenant      string            `json:"tenant"`
	Labels      map[string]string `json:"labels"`
	AgentSocket string            `json:"agentSocket"` // used by the plugin
	AddressKey  string            `json:"addressKey"`  // of a configuration for one container, as of a lab
	// Beside Tenant, those that an annotation may name. Both keys are decoded by decodeTrust, because only an ADD may
	// fail for them.
	RawAllowed     json.RawMessage `json:"allowedTenants"`
	RawAnnotations json.RawMessage `json:"annotations"`
	AllowedTenants []string        `json:"-"`
	Annotations    trust           `json:"-"`
	// The key in the first edition of CNI 1.1.0; libcni sends both.
	OldAttachments []types.GCAttachment `json:"cni.dev/attachments"`
	RuntimeConfig  struct {
		Annotations  map[string]string `json:"io.kubernetes.cri.pod-annotations"`
		PortMappings json.RawMessage   `json:"portMappings"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			Labels json.RawMessage `json:"labels"`
		} `json:"cni"`
	} `json:"args"`
}

// parseLabelArgs reads the labels of args.cni: a list of keys and values, as in the CNI conventions, or an object.
func parseLabelArgs(raw json.RawMessage) (map[string]string, error) {
	var pairs []struct{ Key, Value string }
	if err := json.Unmarshal(raw, &pairs); err != nil {
		var object map[string]string
		if json.Unmarshal(raw, &object) != nil {
			return nil, errors.New("args.cni.labels is neither a list of {key, value} nor an object of strings")
		}
		return object, nil
	}
	labels := map[string]string{}
	for _, p := range pairs {
		if _, twice := labels[p.Key]; twice {
			return nil, fmt.Errorf("args.cni.labels has key %q twice", p.Key)
		}
		labels[p.Key] = p.Value
	}
	return labels, nil
}

// ParseConfig reads a network configuration and CNI_ARGS.
func ParseConfig(stdin []byte, args string) (Config, error) {
	var f fileConfig
	if err := json.Unmarshal(stdin, &f); err != nil {
		return Config{}, fmt.Errorf("network configuration: %w", err)
	}
	c := Config{
		Network: f.Name, Version: f.CNIVersion,
		Pod: podName(args), namespace: argOf(args, "K8S_POD_NAMESPACE"), ValidAttachments: f.ValidAttachments, file: f,
	}
	if f.ValidAttachments == nil {
		c.ValidAttachments = f.OldAttachments
	}
	return c, nil
}

// Identity returns the tenant and the labels of the container. The labels are those of args.cni.labels or else of the
// file, and those that the pod's annotations add. It adds labels for the pod's namespace, which only the runtime may
// set, and for the names of its ports.
func (c Config) Identity() (name string, labels map[string]string, err error) {
	labels = c.file.Labels
	if raw := c.file.Args.CNI.Labels; raw != nil {
		if labels, err = parseLabelArgs(raw); err != nil {
			return "", nil, err
		}
	}
	if err := c.file.decodeTrust(); err != nil {
		return "", nil, err
	}
	trusted, err := c.file.trust()
	if err != nil {
		return "", nil, err
	}
	annotations := c.file.RuntimeConfig.Annotations
	if trusted == trustNone {
		annotations = nil
	}
	if name, err = c.file.tenantOf(annotations, trusted); err != nil {
		return "", nil, err
	}
	if err := tenant.CheckName(name); err != nil {
		return "", nil, err
	}
	if labels, err = c.labelsOf(annotations, labels); err != nil {
		return "", nil, err
	}
	return name, labels, tenant.CheckLabels(labels)
}

// HostPorts returns the host ports of the container, as the capability portMappings of the CNI conventions has them;
// given is whether the runtime has passed any, or an empty list.
func (c Config) HostPorts() (ports []*pilasterv1.HostPort, given bool, err error) {
	raw := c.file.RuntimeConfig.PortMappings
	if raw == nil || string(raw) == "null" {
		return nil, false, nil
	}
	var mappings []struct {
		HostPort, ContainerPort int
		Protocol, HostIP        string
	}
	if err := json.Unmarshal(raw, &mappings); err != nil {
		return nil, true, fmt.Errorf("portMappings is no list of {hostPort, containerPort, protocol, hostIP}: %w", err)
	}
	for _, m := range mappings {
		p, err := endpoint.NewHostPort(m.HostPort, m.ContainerPort, m.Protocol, m.HostIP)
		if err != nil {
			return nil, true, fmt.Errorf("portMappings: %w; nothing was changed", err)
		}
		out := &pilasterv1.HostPort{Host: uint32(p.Host), Container: uint32(p.Container), Protocol: p.Protocol}
		if p.Address.IsValid() {
			out.Address = p.Address.String()
		}
		ports = append(ports, out)
	}
	return ports, true, nil
}

// podName returns "namespace/name" if CNI_ARGS has both, otherwise "".
func podName(args string) string {
	namespace, name := argOf(args, "K8S_POD_NAMESPACE"), argOf(args, "K8S_POD_NAME")
	if namespace == "" || name == "" {
		return ""
	}
	return namespace + "/" + name
}

// argOf returns the last value of a key in "K=V;K=V".
func argOf(args, key string) (value string) {
	for pair := range strings.SplitSeq(args, ";") {
		if k, v, _ := strings.Cut(pair, "="); k == key {
			value = v
		}
	}
	return value
}
