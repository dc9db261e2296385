// Runs methods of a TorchScript file written by `samestep export` on numbers:
//
//   infer FILE SHAPE METHODS NUMBER...
//   infer emulator.ts 2x3 forward,normalise,jacobian 14 -10 1.5 3 -25 2.5

#include <torch/script.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

at::Tensor input(const std::string& shape, char** first, char** last) {
  std::vector<int64_t> sizes;
  for (const auto& size : split(shape, 'x')) sizes.push_back(std::stoll(size));
  std::vector<float> numbers;
  for (; first != last; ++first) numbers.push_back(std::strtof(*first, nullptr));
  return at::tensor(numbers).view(sizes);
}

void print(const std::string& name, const at::Tensor& result) {
  const auto values = result.detach().to(at::kDouble).contiguous();
  std::cout << name << " " << values.sizes() << "\n" << std::setprecision(9);
  for (int64_t i = 0; i < values.numel(); ++i)
    std::cout << values.const_data_ptr<double>()[i] << (i + 1 < values.numel() ? " " : "\n");
}

int main(int count, char** arguments) {
  if (count < 5) {
    std::cerr << "usage: infer FILE SHAPE METHODS NUMBER...\n";
    return 2;
  }
  try {
    torch::jit::ExtraFilesMap inside{{"samestep.json", ""}};
    auto model = torch::jit::load(arguments[1], at::kCPU, inside);
    std::cout << "metadata " << inside["samestep.json"] << "\n";
    for (const auto& attribute : model.named_attributes(/*recurse=*/false))
      if (attribute.value.isList() || attribute.value.isGenericDict())
        std::cout << attribute.name << " " << attribute.value << "\n";

    // No NoGradGuard and no InferenceMode: a Jacobian needs autograd.
    const auto x = input(arguments[2], arguments + 4, arguments + count);
    for (const auto& name : split(arguments[3], ','))
      print(name, model.get_method(name)({x}).toTensor());
  } catch (const c10::Error& error) {
    std::cerr << "infer: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "infer: " << error.what() << "\n";
    return 1;
  }
}
