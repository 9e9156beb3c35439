package cniserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"pilaster.io/pilaster/internal/tenant"
)

// Annotations of a pod. They have precedence over the configuration file.
const (
	tenantAnnotation = "pilaster.io/tenant"
	labelsAnnotation = "pilaster.io/labels" // "app=web,tier=front"
	portsAnnotation  = "pilaster.io/ports"  // "http=80/TCP,dns=53/UDP": names of the pod's ports
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
	// The key in the first edition of CNI 1.1.0; libcni sends both.
	OldAttachments []types.GCAttachment `json:"cni.dev/attachments"`
	RuntimeConfig  struct {
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
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

// Identity returns the tenant and the labels of the container, each from the first source that has them: the pod's
// annotations, args.cni.labels, the file. It adds labels for the pod's namespace, which only the runtime may set, and
// for the names of its ports.
func (c Config) Identity() (name string, labels map[string]string, err error) {
	name, labels = c.file.Tenant, c.file.Labels
	if raw := c.file.Args.CNI.Labels; raw != nil {
		if labels, err = parseLabelArgs(raw); err != nil {
			return "", nil, err
		}
	}
	annotations := c.file.RuntimeConfig.Annotations
	if t, ok := annotations[tenantAnnotation]; ok {
		name = t
	}
	if text, ok := annotations[labelsAnnotation]; ok {
		if labels, err = tenant.ParseLabels(text); err != nil {
			return "", nil, fmt.Errorf("annotation %s: %w", labelsAnnotation, err)
		}
		if says := tenant.SaysNamespace(labels); says != "" && c.namespace != "" {
			return "", nil, fmt.Errorf(
				"annotation %s: a pod may not set %s; the runtime reports namespace %s",
				labelsAnnotation,
				says,
				c.namespace,
			)
		}
	}
	place := tenant.Place{Namespace: c.namespace}
	if place.Ports, err = tenant.ParsePorts(annotations[portsAnnotation]); err != nil {
		return "", nil, fmt.Errorf("annotation %s: %w", portsAnnotation, err)
	}
	labels = place.With(labels)
	if name == "" {
		return "", nil, errors.New(
			`no tenant is given; set "tenant" in the network configuration, or the annotation ` + tenantAnnotation +
				" of the pod",
		)
	}
	if err := tenant.CheckName(name); err != nil {
		return "", nil, err
	}
	return name, labels, tenant.CheckLabels(labels)
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
