package lab

import (
	"fmt"
	"path/filepath"
	"strings"

	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/specfile"
)

// ReadSpec reads a lab's YAML file. The file's name is the default name of the lab.
func ReadSpec(path string) (Spec, error) {
	b, err := specfile.Read("lab", path)
	if err != nil {
		return Spec{}, err
	}
	return ParseSpec(path, b)
}

// ParseSpec parses YAML. The file's name is the default name of the lab. Errors name the file and the line.
func ParseSpec(file string, b []byte) (Spec, error) {
	s, f, err := specfile.Parse[Spec](file, b)
	if err != nil {
		return Spec{}, err
	}
	if s.Name == "" {
		s.Name = strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	}
	err = s.Validate()
	if err == nil && s.Device == "" && f.Has("$.device") {
		err = &specfile.Error{
			Path: "$.device",
			Text: fmt.Sprintf("device is empty: use %s, or omit it", strings.Join(device.DeviceChoices(), ", ")),
		}
	}
	if err != nil {
		return Spec{}, f.Wrong(err)
	}
	return s, nil
}
